import eslint from '@eslint/js';
import tseslint from 'typescript-eslint';

export default tseslint.config(
  { linterOptions: { reportUnusedDisableDirectives: 'error' } },
  eslint.configs.recommended,
  ...tseslint.configs.strictTypeChecked,
  {
    languageOptions: { parserOptions: { projectService: true, tsconfigRootDir: import.meta.dirname } },
    rules: {
      '@typescript-eslint/restrict-template-expressions': ['error', { allowNumber: true }],
      '@typescript-eslint/no-confusing-void-expression': ['error', { ignoreArrowShorthand: true }],
      '@typescript-eslint/no-extraneous-class': 'off',
      // Lumino's signals are connected with their `this` as second argument.
      '@typescript-eslint/unbound-method': 'off',
      // Types of older JupyterLabs know values that newer ones rule out.
      '@typescript-eslint/no-unnecessary-condition': 'off'
    }
  },
  {
    // The widget's view: JavaScript as the kernel sends it. What it calls is checked by tsc.
    files: ['**/static/*.js'],
    extends: [tseslint.configs.disableTypeChecked],
    rules: { 'no-undef': 'off' }
  },
  { files: ['src/tests/**'], rules: { '@typescript-eslint/no-floating-promises': 'off' } }
);
