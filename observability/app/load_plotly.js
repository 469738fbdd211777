// Fetches plotly.js while the page is still being read; tries again where it did not come. PLOTLY: the name of the file.
(() => {
  const load = () => {
    const tag = document.createElement("script");
    tag.id = "kvscope-plotly";
    tag.src = new URL("./kvscope/PLOTLY", location.href);
    tag.onerror = () => {
      tag.remove();
      setTimeout(load, 2000);
    };
    document.head.append(tag);
  };
  if (!window.Plotly && !document.getElementById("kvscope-plotly")) load();
})();
