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

  const follow = (chart) => {
    chart.followed = true;
    const { axes, visible } = kept.get(place(chart)) || {};
    if (axes) window.Plotly.relayout(chart, axes);
    if (visible) window.Plotly.restyle(chart, { visible: chart.data.map((trace) => visible[trace.name] ?? true) });
    chart.on("plotly_relayout", (change) => {
      if (Object.keys(change).some((key) => key.endsWith(".autorange"))) remember(chart, { axes: undefined });
      else if (Object.keys(change).some((key) => /^[xy]axis\.range/.test(key))) remember(chart, { axes: change });
    });
    chart.on("plotly_restyle", ([change]) => {
      if ("visible" in change) {
        remember(chart, { visible: Object.fromEntries(chart.data.map((trace) => [trace.name, trace.visible])) });
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
