// Draws the charts of cards with Plotly: those in sight first, then the others, each once; new data are drawn into the chart that is
// there, so that it keeps what its reader did to it. Their legends are buttons of the page: keys reach them, they wrap in narrow cards, and
// Plotly's own would take a fifth of the time and of the height.
const CONFIG = { displayModeBar: false, displaylogo: false, doubleClick: false };
const NEAR = 300; // px below the window that count as in sight
const charts = new Map(); // by place on the page
const undrawn = new Set();
let drawing = false;
let draws = 0;

const later = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

const idle = () => (window.requestIdleCallback ? new Promise((done) => requestIdleCallback(done, { timeout: 200 })) : later(50));

const plotly = async () => {
  while (!window.Plotly) await later(20); // load_plotly.js fetches it
  return window.Plotly;
};

// What a chart takes from the theme, light or dark.
const template = (place) => {
  const look = getComputedStyle(place);
  const [text, grid, background, font] = ["text-color", "border-color-light", "background-color", "font"].map((name) => look.getPropertyValue(`--st-${name}`));
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickcolor: grid, tickfont: { color: text, size: 10 } };
  return {
    layout: {
      font: { color: text, family: font }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", xaxis: axis, yaxis: axis, margin: { pad: 4 },
      hoverlabel: { bgcolor: background, bordercolor: grid, font: { color: text } }, legend: { font: { color: text } },
    },
    data: { scatter: [{ marker: { line: { width: 0 } } }], bar: [{ marker: { line: { width: 0 } } }] },
  };
};

const inSight = ({ place }) => {
  const { top, bottom } = place.getBoundingClientRect();
  return bottom > -NEAR && top < innerHeight + NEAR;
};

const group = ({ legendgroup, name }) => legendgroup || name;

// What a legend names, as Plotly decides it: each group once, nothing where there is only one that does not ask for it.
const named = (data) => {
  const first = new Map(data.filter(({ name, showlegend, type }) => name && showlegend !== false && type !== "heatmap").reverse().map((trace) => [group(trace), trace]));
  const all = [...first.values()].reverse();
  return all.length > 1 || all[0]?.showlegend ? all : [];
};

// How a trace looks beside its name: a kind and a colour.
const look = ({ type, mode, stackgroup, fill, fillcolor, line = {}, marker = {} }) => {
  if (type === "bar") return ["area", marker.color];
  if (stackgroup || (fill && !line.width)) return ["area", fillcolor];
  if (mode === "markers") return ["point", marker.color];
  return [line.dash ? "dotted" : "line", line.color];
};

// A click hides what is named or shows it again, a double click shows it alone or all.
const legend = (chart, data) => {
  const all = named(data).map((trace) => ({ key: group(trace), name: trace.name, kind: look(trace) }));
  const keys = all.map(({ key }) => key);
  const show = () => {
    for (const [n, button] of [...chart.names.children].entries()) button.ariaPressed = String(!chart.hidden.has(keys[n]));
  };
  const change = (hidden) => {
    chart.hidden = hidden;
    show();
    ask(chart);
  };
  const text = JSON.stringify(all);
  if (chart.legend !== text) {
    chart.legend = text;
    chart.names.replaceChildren(...all.map(({ key, name, kind: [kind, colour] }) => {
      const button = document.createElement("button");
      button.className = kind;
      button.style.setProperty("--colour", colour);
      button.append(document.createElement("i"), name);
      button.onclick = () => change(chart.hidden.symmetricDifference(new Set([key])));
      button.ondblclick = () => change(new Set(keys.some((each) => each !== key && !chart.hidden.has(each)) ? keys.filter((each) => each !== key) : []));
      return button;
    }));
  }
  show();
};

// The ranges of the axes as they were sent, to go back to.
const ranges = (layout) => Object.fromEntries(["xaxis", "yaxis"].flatMap((axis) => {
  const { range, autorange } = layout[axis] ?? {};
  return range ? [[`${axis}.range`, [...range]]] : [[`${axis}.autorange`, autorange ?? true]];
}));

// Plotly itself would keep a zoom for as long as the sent range stays the same, which that of time does not, and go back to the ranges of the
// first drawing; and it knows lines by their place, which changes where a gap divides them. So it keeps nothing, and this does.
const draw = async (Plotly, chart) => {
  const { place, revision } = chart;
  const { clientWidth: width, clientHeight: height } = place;
  if (!width || !place.isConnected) return; // hidden: drawn when it has a size
  Object.assign(chart, { width, height });
  const { data, layout } = chart.figure ?? JSON.parse(chart.text); // anew each time: Plotly changes what it draws
  chart.figure = undefined;
  if (chart.drawn !== revision) chart.zoom = undefined;
  const hidden = chart.names.children.length ? chart.hidden : new Set(); // what no name could show again is shown
  for (const trace of data) if (hidden.has(group(trace))) trace.visible = "legendonly";
  chart.sent = ranges(layout);
  chart.drawn = revision;
  await Plotly.react(place, data, { ...layout, uirevision: ++draws, width, height, showlegend: false, template: JSON.parse(chart.theme) }, CONFIG);
  if (!charts.has(place)) return; // the reader left meanwhile
  if (!chart.followed) follow(chart);
  if (chart.zoom) await Plotly.relayout(place, chart.zoom);
};

const follow = (chart) => {
  chart.followed = true;
  chart.place.on("plotly_relayout", (change) => {
    const axes = Object.entries(change).filter(([key]) => /^[xy]axis\.range\[/.test(key));
    if (axes.length) chart.zoom = { ...chart.zoom, ...Object.fromEntries(axes) };
  });
  chart.place.on("plotly_doubleclick", () => {
    chart.zoom = undefined;
    window.Plotly.relayout(chart.place, chart.sent);
  });
};

const drawAll = async () => {
  if (drawing) return;
  drawing = true;
  try {
    const Plotly = await plotly();
    while (undrawn.size) {
      const all = [...undrawn];
      const chart = all.find(inSight);
      if (!chart) await idle();
      const next = chart ?? all[0];
      undrawn.delete(next);
      await draw(Plotly, next).catch((error) => charts.has(next.place) && console.error("a chart was not drawn", error));
      await later(0);
    }
  } catch (error) {
    console.error(error);
  } finally {
    drawing = false;
  }
};

const ask = (chart) => {
  undrawn.add(chart);
  drawAll();
};

const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const chart = charts.get(target);
    if (chart && (target.clientWidth !== chart.width || target.clientHeight !== chart.height)) ask(chart);
  }
});

export default ({ data, parentElement }) => {
  let [heading, body] = parentElement.querySelectorAll(":scope > .heading, :scope > .body");
  if (!body) {
    const [names, place] = [document.createElement("div"), document.createElement("div")];
    heading = Object.assign(document.createElement("div"), { className: "heading" });
    body = Object.assign(document.createElement("div"), { className: "body" });
    Object.assign(names, { className: "names", role: "group", ariaLabel: "Shown" });
    Object.assign(place, { className: "chart", role: "figure" });
    body.append(names, place);
    parentElement.append(heading, body);
    charts.set(place, { place, names, hidden: new Set() });
    sizes.observe(place);
  }
  const place = body.lastElementChild;
  const chart = charts.get(place);
  const leave = () => {
    if (parentElement.isConnected) return; // of an update that a later one overtook: the chart stays
    sizes.unobserve(place);
    undrawn.delete(chart);
    charts.delete(place);
    window.Plotly?.purge(place);
    heading.remove();
    body.remove();
  };
  const text = new TextDecoder().decode(data);
  const theme = JSON.stringify(template(place));
  if (chart.text === text && chart.theme === theme) return leave;
  const figure = JSON.parse(text);
  if (chart.heading !== figure.heading) heading.innerHTML = chart.heading = figure.heading;
  place.ariaLabel = parentElement.closest('[class*="st-key-card-"]')?.querySelector("h3.question")?.title ?? "";
  if (chart.revision !== figure.revision) chart.hidden = new Set();
  Object.assign(chart, { text, theme, figure, revision: figure.revision });
  body.style.height = `${figure.layout.height}px`;
  legend(chart, figure.data);
  ask(chart);
  return leave;
};
