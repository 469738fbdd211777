// Turns Grafana's TypeScript types into JSON Schema and reads its lists of units, reducers and transformations, so that
// the Python tests can check a board without Node. Run by hand when the pins in package.json change.
import fs from 'node:fs';
import { createRequire } from 'node:module';
import { createGenerator } from 'ts-json-schema-generator';

const require = createRequire(import.meta.url);
const version = require('@grafana/schema/package.json').version;
const notice = `Made from @grafana/schema and @grafana/data ${version} (Apache-2.0, Copyright Grafana Labs) by generate.mjs; see NOTICE.`;

const withoutDescriptions = (node) => {
  if (Array.isArray(node)) return node.map(withoutDescriptions);
  if (node === null || typeof node !== 'object') return node;
  return Object.fromEntries(
    Object.entries(node)
      // `description` as text explains; as an object it is a property of that name
      .filter(([key, value]) => !((key === 'description' || key === '$comment') && typeof value === 'string'))
      .map(([key, value]) => [key, withoutDescriptions(value)])
  );
};

const kinds = { dashboard: 'Dashboard', row: 'Row', bargauge: 'BarGauge', heatmap: 'Heatmap', stat: 'Stat', 'state-timeline': 'StateTimeline', table: 'Table', text: 'Text', timeseries: 'TimeSeries', xychart: 'XYChart' };
const schemas = {};
for (const [kind, type] of Object.entries(kinds)) {
  // expose none: else all the kinds' `Options` become one definition, and the schema is wrong
  const generator = createGenerator({ path: 'types.ts', tsconfig: 'tsconfig.json', type, expose: 'none', topRef: false, additionalProperties: false });
  schemas[kind] = withoutDescriptions(generator.createSchema(type));
}

const data = require('@grafana/data');
globalThis.navigator ??= { language: 'en', languages: ['en'] }; // after the require: Grafana takes it for a browser else
const ids = {
  notice,
  units: data.getValueFormats().flatMap((group) => group.submenu.map((unit) => unit.value)).sort(),
  reducers: data.fieldReducers.list().map((reducer) => reducer.id).sort(),
  fieldMatchers: data.fieldMatchers.list().map((matcher) => matcher.id).sort(),
  colorModes: data.fieldColorModeRegistry.list().map((mode) => mode.id).sort(),
  transformations: Object.fromEntries(
    Object.values(data.standardTransformers)
      .map((transformer) => [transformer.id, Object.keys(transformer.defaultOptions ?? {}).sort()])
      .sort()
  ),
};

fs.writeFileSync(`grafana-${version}-types.json`, JSON.stringify({ notice, schemas }) + '\n');
fs.writeFileSync(`grafana-${version}-ids.json`, JSON.stringify(ids, null, 1) + '\n');
