/**
 * The form for a pool. Which kinds there are, what each asks for and what that means is told by the kernel; so is what
 * is wrong. Nothing of the kernel's machine is looked at before a form is opened.
 */
import { HTMLSelect } from '@jupyterlab/ui-components';
import * as React from 'react';

import { definition, filled, Form, ofKind, opened, parted, trialOf, typed } from './formstate.js';
import { Answer, FormField, FoundPool, Overview, PoolKind, Request, SettingsFile } from './protocol.js';
import * as view from './view.js';

interface Props {
  /** The pool to change; empty for a new one. */
  pool: string;
  /** null while the kernel restarts: the typed text stays. */
  overview: Overview | null;
  /** Rejects if the kernel does not answer. */
  ask: (request: Request) => Promise<Answer>;
  /** `told`: a sentence on what was done; empty if nothing was. */
  close: (told: string) => void;
  /** The height of the form has changed. */
  resized: () => void;
  t: view.Say;
}

interface Asked {
  kinds: PoolKind[];
  files: SettingsFile[];
  found: FoundPool[];
}

export function PoolForm({ pool, overview, ask, close, resized, t }: Props): React.JSX.Element {
  const [asked, setAsked] = React.useState<Asked | null>(null);
  const [form, setForm] = React.useState<Form | null>(null);
  const [trouble, setTrouble] = React.useState('');
  const [busy, setBusy] = React.useState(false);
  const [trialId, setTrialId] = React.useState('');
  const heading = React.useRef<HTMLHeadingElement>(null);
  const trial = trialOf(overview?.trial, trialId);
  const names = overview?.pools.map(each => each.name) ?? [];

  /** Ask the kernel; the form shows a refusal or a missing answer. */
  const attempt = async (request: Request): Promise<Answer | null> => {
    setTrouble('');
    setBusy(true);
    try {
      const answer = await ask(request);
      if (!answer.ok) {
        throw new Error(answer.error ?? '');
      }
      setForm(now => now && { ...now, errors: answer.errors ?? {} });
      return answer.errors ? null : answer;
    } catch (error) {
      setTrouble(error instanceof Error ? error.message : String(error));
      return null;
    } finally {
      setBusy(false);
    }
  };
  const load = async (): Promise<void> => {
    const answer = await attempt({ op: 'pool_forms', pool });
    if (answer?.kinds && answer.files) {
      setAsked({ kinds: answer.kinds, files: answer.files, found: answer.found ?? [] });
      setForm(opened(answer.kinds, answer.files, answer.edited));
    }
  };
  React.useEffect(() => {
    void load();
    heading.current?.focus();
  }, [pool]);
  React.useEffect(() => {
    const { activeElement } = document;
    // A button that is disabled while the kernel answers has no focus any more.
    if (form && Object.keys(form.errors).length > 0 && (activeElement === document.body || activeElement?.closest('.jp-Distributed-foot'))) {
      heading.current?.parentElement?.querySelector<HTMLElement>('[aria-invalid="true"]')?.focus();
    }
  }, [form?.errors]);
  React.useEffect(resized, [asked, form?.kind, form?.errors, trouble, trial?.text]);

  const endTrial = async (): Promise<void> => {
    setTrialId('');
    if (trialId) {
      await ask({ op: 'end_trial', id: trialId }).catch(() => undefined);
    }
  };
  const change = (next: Form): void => {
    setForm(next);
    setTrouble('');
    void endTrial(); // the test was for the earlier content
  };
  const test = async (): Promise<void> => {
    const id = `${Date.now()}-${Math.random()}`;
    setTrialId(id);
    if (form) {
      await attempt({ op: 'try_pool', id, ...definition(form) });
    }
  };
  const leave = async (told: string): Promise<void> => {
    await endTrial();
    close(told);
  };
  const save = async (): Promise<void> => {
    const answer = form && (await attempt({ op: 'write_pool', ...definition(form) }));
    if (answer) {
      await leave(answer.told ?? '');
    }
  };

  const title = pool ? t('Change the pool %1', pool) : t('Add a pool');
  return (
    <form
      className="jp-Distributed-form"
      aria-label={title}
      noValidate
      onSubmit={event => {
        event.preventDefault();
        void save();
      }}
      onKeyDown={event => event.key === 'Escape' && void leave('')}
    >
      <h3 tabIndex={-1} ref={heading}>
        {title}
      </h3>
      {asked && form && <Fields asked={asked} form={form} names={names} change={change} t={t} />}
      <div className="jp-Distributed-foot">
        {trouble && <Wrong text={trouble} />}
        {trial && (
          <p className={`jp-Distributed-result jp-mod-${trial.state}`} role="status">
            {trial.state === 'running' ? t('Testing the connection ...') : trial.text}
          </p>
        )}
        <div className="jp-Distributed-buttons">
          {form ? (
            <button type="submit" className="jp-Distributed-button jp-mod-main" disabled={busy}>
              {t('Save')}
            </button>
          ) : (
            trouble && <Act name={t('Ask again')} onClick={() => void load()} />
          )}
          {form && trial?.state !== 'running' && <Act name={t('Test the connection')} title={t('Reach the parts of the pool; no ranks are started')} disabled={busy} onClick={() => void test()} />}
          {trial?.state === 'running' && <Act name={t('Cancel the test')} onClick={() => void endTrial()} />}
          <Act name={t('Close')} title={t('Close the form; nothing is written')} onClick={() => void leave('')} />
        </div>
      </div>
    </form>
  );
}

interface FieldsProps {
  asked: Asked;
  form: Form;
  names: string[];
  change: (form: Form) => void;
  t: view.Say;
}

function Fields({ asked: { kinds, files, found }, form, names, change, t }: FieldsProps): React.JSX.Element {
  // The fields at the top are fixed when the kind is chosen, so that none moves away while it is filled in.
  const [above, setAbove] = React.useState(form.values);
  const replace = (next: Form): void => {
    setAbove(next.values);
    change(next);
  };
  const kind = kinds.find(each => each.kind === form.kind);
  const [shown, others] = parted(kind?.fields ?? [], above, form.errors);
  const file = files.find(each => each.key === form.file);
  const isNew = form.before === null;
  const row = (field: FormField): React.JSX.Element => <Field key={field.name} field={field} form={form} change={change} t={t} />;
  return (
    <>
      {found.length > 0 && (
        <Select
          label={t('Found')}
          value=""
          options={[['', t('on this machine: choose to fill in')], ...found.map((each, place): [string, string] => [String(place), each.text])]}
          onPick={place => {
            const one = place ? found[Number(place)] : undefined;
            if (one) {
              replace(filled(form, one, names));
            }
          }}
        />
      )}
      <Select
        label={t('Kind')}
        value={form.kind}
        options={kinds.map(each => [each.kind, each.kind])}
        onPick={name => {
          const other = kinds.find(each => each.kind === name);
          if (other) {
            replace(ofKind(form, other));
          }
        }}
        disabled={!isNew}
        note={kind?.about}
      />
      <Field field={{ name: 'name', meaning: t('the name that cells give after --pool'), default: '', choices: [], switch: false, main: true, example: '' }} form={form} change={change} t={t} disabled={!isNew} />
      {shown.map(row)}
      {others.length > 0 && (
        <details className="jp-Distributed-group">
          <summary>{t.n('%1 more option', '%1 more options', others.length)}</summary>
          <div className="jp-Distributed-fields">{others.map(row)}</div>
        </details>
      )}
      <Select
        label={t('Write to')}
        value={form.file}
        options={files.map(each => [each.key, each.shown])}
        onPick={key => change({ ...form, file: key })}
        disabled={!isNew}
        error={file?.problem ? t('%1 cannot be written: %2.', file.shown, file.problem) : ''}
      />
    </>
  );
}

interface FieldProps {
  field: FormField;
  form: Form;
  change: (form: Form) => void;
  t: view.Say;
  disabled?: boolean;
}

function Field({ field, form, change, t, disabled }: FieldProps): React.JSX.Element {
  const { name } = field;
  const value = (name === 'name' ? form.name : form.values[name]) ?? '';
  const error = form.errors[name] ?? '';
  const note = [field.meaning, field.default && t('default: %1', field.default)].filter(Boolean).join('; ');
  const put = (text: string): void => change(typed(form, name, text));
  if (field.choices.length > 0) {
    return <Select label={name} value={value} options={[['', ''], ...field.choices.map((each): [string, string] => [each, each])]} onPick={put} note={note} error={error} />;
  }
  const described = { 'aria-label': name, 'aria-invalid': error !== '', 'aria-description': error || note, disabled };
  return (
    <Row label={name} note={note} error={error}>
      {field.switch ? (
        <input {...described} type="checkbox" checked={value !== ''} onChange={event => put(event.target.checked ? 'true' : '')} />
      ) : (
        <input {...described} type="text" className="jp-mod-styled" spellCheck={false} autoComplete="off" placeholder={field.example} required={field.example !== ''} value={value} onChange={event => put(event.target.value)} />
      )}
    </Row>
  );
}

interface SelectProps {
  label: string;
  value: string;
  options: [string, string][];
  onPick: (value: string) => void;
  note?: string | undefined;
  error?: string;
  disabled?: boolean;
}

function Select({ label, value, options, onPick, note, error, disabled }: SelectProps): React.JSX.Element {
  return (
    <Row label={label} note={note} error={error}>
      <HTMLSelect aria-label={label} aria-description={error || note} disabled={disabled} value={value} onChange={event => onPick(event.target.value)}>
        {options.map(([key, name]) => (
          <option key={key} value={key}>
            {name}
          </option>
        ))}
      </HTMLSelect>
    </Row>
  );
}

function Row({ label, note, error, children }: { label: string; note?: string | undefined; error?: string | undefined; children: React.ReactNode }): React.JSX.Element {
  return (
    <div className="jp-Distributed-entry">
      <label className="jp-Distributed-field">
        <span title={label}>{label}</span>
        {children}
      </label>
      {note && <p className="jp-Distributed-note">{note}</p>}
      {error && <Wrong text={error} />}
    </div>
  );
}

function Wrong({ text }: { text: string }): React.JSX.Element {
  return (
    <p className="jp-Distributed-wrong" role="alert">
      {text}
    </p>
  );
}

function Act({ name, title, disabled, onClick }: { name: string; title?: string; disabled?: boolean; onClick: () => void }): React.JSX.Element {
  return (
    <button type="button" className="jp-Distributed-button" title={title} disabled={disabled} onClick={onClick}>
      {name}
    </button>
  );
}
