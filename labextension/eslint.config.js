import eslint from '@eslint/js';
import tseslint from 'typescript-eslint';

export default tseslint.config(
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
  { files: ['src/tests/**'], rules: { '@typescript-eslint/no-floating-promises': 'off' } }
);
