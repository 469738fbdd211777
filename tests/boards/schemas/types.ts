// One type for each thing a board holds, with exact options, so that an unknown key or value is an error.
// The raw types are used because the package's root types let any key in (`Record<string, unknown>`).
import type * as Raw from '@grafana/schema/dist/esm/raw/dashboard/x/Dashboard_types.gen';
import type * as BarGaugeCfg from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type * as HeatmapCfg from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
import type * as StatCfg from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as StateTimelineCfg from '@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen';
import type * as TableCfg from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as TextCfg from '@grafana/schema/dist/esm/raw/composable/text/panelcfg/x/TextPanelCfg_types.gen';
import type * as TimeSeriesCfg from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type * as XYChartCfg from '@grafana/schema/dist/esm/raw/composable/xychart/panelcfg/x/XYChartPanelCfg_types.gen';

// Grafana's own type of a Prometheus query is AGPL-3.0-only; these are the fields that it reads, in our words.
interface Target {
  refId: string;
  datasource: { type: 'prometheus'; uid: string };
  expr: string;
  editorMode?: 'code' | 'builder';
  exemplar?: boolean;
  format?: 'time_series' | 'table' | 'heatmap';
  hide?: boolean;
  instant?: boolean;
  interval?: string;
  legendFormat?: string;
  range?: boolean;
}

type Override<T, Custom> = Omit<T, 'custom'> & { custom?: Custom };
interface FieldConfigOf<Custom> {
  defaults: Override<Raw.FieldConfig, Custom>;
  overrides: Raw.FieldConfigSource['overrides'];
}
type PanelOf<Kind extends string, Options, Custom> = Omit<
  Raw.Panel,
  'type' | 'options' | 'fieldConfig' | 'targets' | 'title'
> & { type: Kind; title: string; options: Options; fieldConfig: FieldConfigOf<Custom>; targets?: Target[] };

// An annotation by a Prometheus query; the published type leaves its fields out (they are set by the data source's editor).
type Annotation = Raw.AnnotationQuery & {
  expr?: string;
  step?: string;
  tagKeys?: string;
  textFormat?: string;
  titleFormat?: string;
};

export type Dashboard = Omit<Raw.Dashboard, 'panels' | 'annotations'> & {
  panels: unknown[];
  annotations: { list: Annotation[] };
};
export type Row = Omit<Raw.RowPanel, 'panels'> & { panels: unknown[] };
export type BarGauge = PanelOf<'bargauge', BarGaugeCfg.Options, Record<string, never>>;
export type Heatmap = PanelOf<'heatmap', HeatmapCfg.Options, HeatmapCfg.FieldConfig>;
export type Stat = PanelOf<'stat', StatCfg.Options, Record<string, never>>;
export type Table = PanelOf<'table', TableCfg.Options, TableCfg.FieldConfig>;
export type Text = Omit<PanelOf<'text', TextCfg.Options, never>, 'fieldConfig' | 'targets'>;
export type TimeSeries = PanelOf<'timeseries', TimeSeriesCfg.Options, TimeSeriesCfg.FieldConfig>;
export type StateTimeline = PanelOf<'state-timeline', StateTimelineCfg.Options, StateTimelineCfg.FieldConfig>;
export type XYChart = PanelOf<'xychart', XYChartCfg.Options, XYChartCfg.FieldConfig>;
