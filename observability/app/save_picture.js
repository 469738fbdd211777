// Saves a card's chart as a picture, made here in the browser: the buttons of a card's menu name the chart and the format.
(() => {
  if (window.kvscopePictures) return;
  window.kvscopePictures = true;

  document.addEventListener("click", ({ target }) => {
    const button = target.closest?.("button.save[data-chart]");
    if (!button) return;
    const key = button.dataset.chart;
    const card = document.querySelector(`.st-key-card-${CSS.escape(key)}`);
    const chart = card?.querySelector(".js-plotly-plot");
    if (!chart || !window.Plotly) return;
    const page = getComputedStyle(document.querySelector(".stApp"));
    const [question, unit] = ["h3.question", "h3.question small"].map((part) => card.querySelector(part)?.textContent ?? "");
    const text = question.slice(0, question.length - unit.length) + (unit && ` (${unit})`);
    const { clientWidth: width, clientHeight: height } = chart;
    const showlegend = Boolean(card.querySelector(".names button"));
    const legend = showlegend ? 28 : 0; // below the chart
    const layout = {
      ...chart.layout,
      showlegend,
      width,
      height: height + 34 + legend,
      margin: { ...chart.layout.margin, t: (chart.layout.margin?.t ?? 4) + 34, b: (chart.layout.margin?.b ?? 4) + legend },
      title: { text: text.replace(/[<>&]/g, (c) => `&#${c.charCodeAt(0)};`), x: 0.01, xanchor: "left", yref: "container", y: 1, yanchor: "top", pad: { t: 8 }, font: { size: 14, color: page.color } },
      legend: { ...chart.layout.legend, yref: "container", y: 0, yanchor: "bottom" },
      paper_bgcolor: page.backgroundColor,
      plot_bgcolor: page.backgroundColor,
    };
    window.Plotly.downloadImage({ data: chart.data, layout }, { format: button.dataset.format, width, height: layout.height, scale: 2, filename: `kvscope-${key}` });
  });
})();
