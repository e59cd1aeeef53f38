"use strict";
const themeOf = () => {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: color("--line"), linecolor: color("--line"), tickcolor: color("--line"), zerolinecolor: color("--line") };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("--ink"), family: getComputedStyle(document.body).fontFamily, size: 13 },
    hoverlabel: { align: "left", bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") } },
    xaxis: axis, yaxis: axis,
  };
};
const merged = (into, from) => {
  for (const [key, value] of Object.entries(from)) {
    into[key] = value !== null && typeof value === "object" && !Array.isArray(value) ? merged({ ...into[key] }, value) : value;
  }
  return into;
};
const draw = () => {
  for (const place of document.querySelectorAll("[data-plot]")) {
    const figure = JSON.parse(document.getElementById("plot-" + place.dataset.plot).textContent);
    Plotly.react(place, figure.data, merged(figure.layout, themeOf()), { responsive: true, displaylogo: false, displayModeBar: false });
  }
};
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
