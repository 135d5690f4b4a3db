/** What a form for a pool holds, and how that changes. Pure. */
import { EditedPool, FormField, FoundPool, PoolDefinition, PoolKind, SettingsFile, Trial } from './protocol.js';

export interface Form {
  name: string;
  kind: string;
  file: string;
  values: Record<string, string>;
  /** The values with which the form of a pool was opened; null for a new pool. */
  before: Record<string, string> | null;
  /** Sentences by the name of the field. */
  errors: Record<string, string>;
}

/** The form of a new pool, or of the pool that is being changed. */
export function opened(kinds: PoolKind[], files: SettingsFile[], edited?: EditedPool): Form {
  if (edited) {
    return { ...edited, values: { ...edited.values }, before: edited.values, errors: {} };
  }
  const file = files.find(each => !each.problem) ?? files[0];
  return { name: '', kind: kinds[0]?.kind ?? '', file: file?.key ?? '', values: {}, before: null, errors: {} };
}

/** The form with the possible pools that were found on the kernel's machine. */
export function filled(form: Form, found: FoundPool, names: string[]): Form {
  return { ...form, kind: found.kind, name: unused(found.name, names), values: { ...found.options }, errors: {} };
}

/** The form for another kind; fields that both kinds have keep their content. */
export function ofKind(form: Form, kind: PoolKind): Form {
  const known = new Set(kind.fields.map(field => field.name));
  const values = Object.fromEntries(Object.entries(form.values).filter(([name]) => known.has(name)));
  return { ...form, kind: kind.kind, values, errors: {} };
}

/** The form with another text in a field; an earlier error there is no longer shown. */
export function typed(form: Form, name: string, text: string): Form {
  const errors = without(form.errors, name);
  if (name === 'name') {
    return { ...form, name: text, errors };
  }
  const others = without(form.values, name);
  return { ...form, values: text ? { ...others, [name]: text } : others, errors };
}

function without(record: Record<string, string>, name: string): Record<string, string> {
  return Object.fromEntries(Object.entries(record).filter(([key]) => key !== name));
}

export function definition({ name, kind, file, values, before }: Form): PoolDefinition {
  return { name, kind, file, values, ...(before ? { before } : {}) };
}

/** A name that no pool has: `gpu`, `gpu-2` ... */
export function unused(name: string, names: string[]): string {
  let chosen = name;
  for (let number = 2; names.includes(chosen); number += 1) {
    chosen = `${name}-${number}`;
  }
  return chosen;
}

/** The fields that are shown at once, and the others. A field with an error is never among the others. */
export function parted(fields: FormField[], filled: Record<string, string>, errors: Record<string, string>): [FormField[], FormField[]] {
  const shown = (field: FormField): boolean => field.main || field.name in filled || field.name in errors;
  return [fields.filter(shown), fields.filter(field => !shown(field))];
}

/** The test that this form has requested; null if there is none, or if it belongs to another form. */
export function trialOf(trial: Trial | null | undefined, id: string): Trial | null {
  return trial && trial.id === id ? trial : null;
}
