// Keeps what a reader did to a chart. Streamlit draws a chart anew whenever its data change; this puts the zoom and the
// hidden series of the same card back, as long as page and time range stay the same.
(() => {
  if (window.kvscopeKept) return;
  const kept = (window.kvscopeKept = new Map());

  const place = (chart) => {
    const card = chart.closest('[class*="st-key-card-"]');
    const query = new URLSearchParams(location.search);
    const name = card && card.className.match(/st-key-card-\S+/)[0];
    return [location.pathname, query.get("range"), query.get("end"), query.get("tz"), name].join(" ");
  };

  const remember = (chart, what) => kept.set(place(chart), { ...kept.get(place(chart)), ...what });

  const put = (chart) => {
    const { axes, visible } = kept.get(place(chart)) || {};
    const at = (key) => key.split(/[.[\]]+/).filter(Boolean).reduce((part, name) => part?.[name], chart.layout);
    if (axes && Object.entries(axes).some(([key, value]) => at(key) !== value)) window.Plotly.relayout(chart, axes);
    const wanted = visible && chart.data.map((trace) => visible[trace.name] ?? true);
    if (wanted && chart.data.some((trace, i) => (trace.visible ?? true) !== wanted[i])) {
      window.Plotly.restyle(chart, { visible: wanted });
    }
  };

  const follow = (chart) => {
    chart.followed = true;
    // More than once: Streamlit lays a new chart out again when it knows its size, from what it was first given.
    for (const milliseconds of [0, 150, 600]) setTimeout(() => chart.isConnected && put(chart), milliseconds);
    chart.on("plotly_doubleclick", () => {
      chart.resetting = true;
    });
    chart.on("plotly_relayout", (change) => {
      const axes = Object.entries(change).filter(([key]) => /^[xy]axis\.range\[/.test(key));
      if (chart.resetting || "xaxis.autorange" in change) remember(chart, { axes: undefined });
      else if (axes.length) remember(chart, { axes: Object.fromEntries(axes) });
      chart.resetting = false;
    });
    chart.on("plotly_restyle", ([change]) => {
      if ("visible" in change) {
        remember(chart, { visible: Object.fromEntries(chart.data.map((trace) => [trace.name, trace.visible ?? true])) });
      }
    });
  };

  let asked = false;
  const look = () => {
    asked = false;
    for (const chart of document.querySelectorAll(".js-plotly-plot")) {
      if (!chart.followed && chart._fullLayout && chart.on && window.Plotly) follow(chart);
    }
  };
  new MutationObserver(() => {
    if (!asked) asked = Boolean(requestAnimationFrame(look));
  }).observe(document.body, { childList: true, subtree: true });
})();
