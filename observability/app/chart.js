// Draws the charts of cards with Plotly: those in sight first, then the others, each once; new data are drawn into the chart that is
// there, so that it keeps what its reader did to it.
const CONFIG = { displayModeBar: false, displaylogo: false };
const NEAR = 300; // px below the window that count as in sight
const charts = new Map(); // by place on the page
const undrawn = new Set();
let drawing = false;

const later = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

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

const draw = async (Plotly, chart) => {
  const { place, figure } = chart;
  const width = place.clientWidth;
  if (!width || !place.isConnected) return; // hidden: drawn when it has a size
  chart.width = width;
  await Plotly.react(place, figure.data, { ...figure.layout, width, template: template(place) }, CONFIG);
  if (!chart.followed) follow(chart);
  if (chart.revision !== figure.layout.uirevision) Object.assign(chart, { zoom: undefined, revision: figure.layout.uirevision });
  if (chart.zoom) await Plotly.relayout(place, chart.zoom);
};

// Plotly keeps what a reader hid as long as uirevision stays, but not the zoom, since the range of time itself goes on.
const follow = (chart) => {
  chart.followed = true;
  chart.place.on("plotly_relayout", (change) => {
    const axes = Object.entries(change).filter(([key]) => /^[xy]axis\.range\[/.test(key));
    if (chart.resetting || "xaxis.autorange" in change) chart.zoom = undefined;
    else if (axes.length) chart.zoom = Object.fromEntries(axes);
    chart.resetting = false;
  });
  chart.place.on("plotly_doubleclick", () => {
    chart.resetting = true;
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
      if (!chart) await new Promise((done) => requestIdleCallback(done, { timeout: 200 }));
      const next = chart ?? all[0];
      undrawn.delete(next);
      await draw(Plotly, next).catch((error) => console.error("a chart was not drawn", error));
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
    if (chart && target.clientWidth !== chart.width) ask(chart);
  }
});

export default ({ data, parentElement }) => {
  let place = parentElement.querySelector(":scope > .chart");
  if (!place) {
    place = document.createElement("div");
    place.className = "chart";
    place.setAttribute("role", "figure");
    place.ariaLabel = parentElement.closest('[class*="st-key-card-"]')?.querySelector("h3.question")?.title ?? "";
    parentElement.append(place);
    charts.set(place, { place });
    sizes.observe(place);
  }
  const chart = charts.get(place);
  const leave = () => {
    sizes.unobserve(place);
    undrawn.delete(chart);
    charts.delete(place);
    window.Plotly?.purge(place);
    place.remove();
  };
  const text = new TextDecoder().decode(data);
  const theme = JSON.stringify(template(place));
  if (chart.text === text && chart.theme === theme) return leave;
  Object.assign(chart, { text, theme, figure: JSON.parse(text) });
  place.style.height = `${chart.figure.layout.height}px`;
  ask(chart);
  return leave;
};
