"use strict";
// The page's controls: which runs are shown, the x axis, the smoothing, and the completions browser.
// Everything drawn comes from the JSON in #data; text goes into the page as text (textContent), never as HTML.

const page = JSON.parse(document.getElementById("data").textContent);
const t = page.texts;
const controls = document.getElementById("controls");
const hidden = new Set();
const shown = (run) => !hidden.has(run);

const say = (key, values) => t[key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (run) => css(run < 0 ? "--run-base" : `--run-${Math.min(run, 7)}`);
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;

// Curves

// Mean over a centred window of steps. A gap stays a gap and is left out of its neighbours' means.
function smooth(values, width) {
  const half = (width - 1) / 2;
  return values.map((value, i) => {
    if (value === null || width <= 1) return value;
    const near = values.slice(Math.max(0, i - Math.floor(half)), i + Math.ceil(half) + 1).filter((v) => v !== null);
    return near.reduce((sum, v) => sum + v, 0) / near.length;
  });
}

function curve(figure, run, index) {
  const y = run.columns[figure.column];
  const x = run.x[controls.elements.axis.value];
  if (!shown(index) || !y || !x.length) return [];
  const width = figure.smooth ? Number(controls.elements.smoothing.value) : 1;
  // The first run's line is the widest, so that it still shows where others lie exactly on it.
  const base = { x, name: run.name, line: { color: colour(index), width: index ? 1.8 : 3.2 }, hoverlabel: { namelength: 30 } };
  const format = figure.percent ? "%{y:.1%}" : "%{y:.4~g}";
  if (figure.points) { // measured every few steps: points joined by a line, as measured
    const kept = y.map((v, i) => i).filter((i) => y[i] !== null);
    return [{ ...base, x: kept.map((i) => x[i]), y: kept.map((i) => y[i]), mode: "lines+markers", hovertemplate: format }];
  }
  // A line needs two neighbours; a step alone between gaps shows as a point.
  const alone = y.map((v, i) => (v !== null && (y[i - 1] ?? null) === null && (y[i + 1] ?? null) === null ? 5 : 0));
  const mode = alone.some(Boolean) ? "lines+markers" : "lines";
  const strong = { ...base, y: smooth(y, width), customdata: y, mode, marker: { size: alone, color: colour(index) }, hovertemplate: format };
  if (width <= 1) return [strong];
  strong.hovertemplate += figure.percent ? " (%{customdata:.1%})" : " (%{customdata:.4~g})";
  return [{ ...base, y, mode: "lines", opacity: 0.35, line: { color: colour(index), width: 1 }, hoverinfo: "skip" }, strong];
}

// On paper nothing resizes itself, so figures are drawn as wide as half a narrow page, bars as wide as a page.
const paperWidth = (pixels) => (matchMedia("print").matches ? pixels : undefined);

function layout(more) {
  const axis = { color: css("--quiet"), gridcolor: css("--rule"), linecolor: css("--rule"), zeroline: false, automargin: true, exponentformat: "e" };
  return {
    paper_bgcolor: css("--paper"), plot_bgcolor: css("--paper"), showlegend: false, margin: { l: 8, r: 8, t: 8, b: 8 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--ink") },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--rule"), font: { color: css("--ink") } },
    // On a touch screen a drag must scroll the page, not zoom a figure.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    ...more,
    xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
  };
}

const config = { displayModeBar: false, responsive: true, doubleClick: "reset" };

// A line that never changes is shown above zero: left alone, Plotly takes 1 to either side of it, whatever its size.
function flat(figure) {
  const values = new Set(page.runs.filter((run, i) => shown(i)).flatMap((run) => run.columns[figure.column] ?? []).filter((v) => v !== null));
  const [value] = values;
  return values.size === 1 ? { range: [Math.min(0, 2 * value), Math.max(0, 2 * value) || (figure.percent ? 0.1 : 1)] } : {};
}

function drawCurves() {
  for (const figure of page.figures) {
    Plotly.react(`plot-${figure.column}`, page.runs.flatMap((run, i) => curve(figure, run, i)), layout({
      width: paperWidth(310), hovermode: "x unified",
      xaxis: { title: { text: t[`axis_title_${controls.elements.axis.value}`], font: { size: 11 } }, showgrid: false, ticks: "outside", spikethickness: 1, spikedash: "solid", spikecolor: css("--quiet") },
      yaxis: { tickformat: figure.percent ? ".2~%" : "", rangemode: figure.percent ? "tozero" : "normal", nticks: 6, ...flat(figure) },
    }), config);
  }
}

// Pointing at a step in one figure shows the same place in all others on the screen.
function linkHover() {
  const plots = page.figures.map((figure) => document.getElementById(`plot-${figure.column}`));
  let linking = false;
  const others = (plot, act) => {
    if (linking) return;
    linking = true;
    for (const other of plots) {
      const box = other.getBoundingClientRect();
      if (other !== plot && other.data.length && box.bottom > 0 && box.top < innerHeight) act(other);
    }
    linking = false;
  };
  for (const plot of plots) {
    plot.on("plotly_hover", (event) => others(plot, (other) => Plotly.Fx.hover(other, { xval: event.xvals[0] })));
    plot.on("plotly_unhover", () => others(plot, (other) => Plotly.Fx.unhover(other)));
  }
}

// Bars

const smallestText = { minsize: 10, mode: "hide" }; // a label that does not fit its bar is in the caption or the table anyway

function drawEvaluation() {
  const rows = page.evaluation.map((run, i) => ({ ...run, index: i - 1 }))
    .filter((run) => run.flexible.accuracy !== undefined && (run.index < 0 || shown(run.index)));
  // As far as the longest whisker needs, so that low accuracies are not crammed against the axis.
  const highest = Math.max(...rows.flatMap((run) => ["flexible", "strict"].map((kind) => run[kind].high ?? run[kind].accuracy ?? 0)));
  const bars = (kind) => ({
    type: "bar", orientation: "h", name: t[kind], y: rows.map((run) => run.name), x: rows.map((run) => run[kind].accuracy),
    marker: { color: rows.map((run) => colour(run.index)), opacity: kind === "strict" ? 0.45 : 1 },
    error_x: {
      type: "data", symmetric: false, color: css("--ink"), thickness: 1.5, width: 4,
      array: rows.map((run) => run[kind].high - run[kind].accuracy), arrayminus: rows.map((run) => run[kind].accuracy - run[kind].low),
    },
    text: rows.map(() => t[kind]), textposition: "inside", insidetextanchor: "start", textangle: 0,
    insidetextfont: { color: kind === "strict" ? css("--ink") : css("--paper") },
    hovertemplate: rows.map((run) => `${percent(run[kind].accuracy)}<extra>${t[kind]}</extra>`),
  });
  Plotly.react("plot-evaluation", [bars("flexible"), bars("strict")], layout({
    width: paperWidth(620), height: 60 + 62 * rows.length, bargap: 0.25, hovermode: "closest", dragmode: false,
    uniformtext: smallestText, xaxis: { range: [0, Math.min(1.02, 1.15 * highest)], nticks: 6, tickformat: ".0%" }, yaxis: { autorange: "reversed", showgrid: false, ticksuffix: " " },
  }), config);
}

function drawCost() {
  const rows = page.cost.map((run, index) => ({ ...run, index })).filter((run) => shown(run.index));
  const phases = Object.keys(page.cost[0].phases);
  Plotly.react("plot-cost", phases.map((phase, i) => ({
    type: "bar", orientation: "h", name: t[phase], y: rows.map((run) => run.name), x: rows.map((run) => run.phases[phase]),
    marker: { color: rows.map((run) => colour(run.index)), opacity: 1 - 0.19 * i, line: { color: css("--paper"), width: 1.5 } },
    text: rows.map(() => t[phase]), textposition: "inside", insidetextanchor: "middle", textangle: 0,
    insidetextfont: { color: css(i < 2 ? "--paper" : "--ink") },
    hovertemplate: `%{x:.4~g} s<extra>${t[phase]}</extra>`,
  })), layout({
    barmode: "stack", width: paperWidth(620), height: 60 + 46 * rows.length, bargap: 0.3, hovermode: "closest", dragmode: false,
    uniformtext: smallestText, xaxis: { ticksuffix: " s" }, yaxis: { autorange: "reversed", showgrid: false, ticksuffix: " " },
  }), config);
}

// Completions

// The completions lie in the page as gzip in base64: small, and no HTML parser ever sees their text.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

// Each filter looks at the runs that are shown; `base` may be null where the baseline is missing.
const filters = {
  all: () => true,
  fixed: (base, runs) => base && !base.correct && runs.some((run) => run.correct),
  broken: (base, runs) => base?.correct && runs.some((run) => !run.correct),
  disagree: (base, runs) => new Set(runs.map((run) => run.correct)).size > 1,
  truncated: (base, runs) => [base, ...runs].some((run) => run?.truncated),
  wrong: (base, runs) => [base, ...runs].every((run) => !run?.correct),
};

function element(name, attributes, ...children) {
  const node = Object.assign(document.createElement(name), attributes);
  node.append(...children.filter((child) => child !== null));
  return node;
}

function answer(sample, index) {
  const name = element("h4", {}, element("span", { className: `swatch run-${index < 0 ? "base" : index}` }), page.evaluation[index + 1].name);
  const card = element("div", { className: "answer" }, name);
  if (!sample) {
    card.append(element("small", { textContent: t.no_completion }));
    return card;
  }
  const verdict = sample.correct ? "right" : "wrong";
  name.append(element("span", { className: `verdict ${sample.correct ? "same" : "differs"}`, textContent: t[verdict] }));
  const facts = [sample.answer ? say("answer_found", sample) : t.answer_none];
  if (sample.correct && !sample.strict) facts.push(t.not_strict);
  if (sample.truncated) facts.push(t.truncated.toLowerCase());
  if (sample.tokens !== null) facts.push(say("tokens_unit", { count: sample.tokens }));
  const text = sample.text + (sample.cut ? ` ${say("cut", { count: sample.cut })}` : "");
  card.append(element("pre", { textContent: text, tabIndex: 0 }), element("small", { textContent: facts.join(t.comma) }));
  return card;
}

async function completions() {
  const form = document.getElementById("browse");
  if (!form) return () => {};
  const { filter, search, previous, next } = form.elements;
  const status = form.querySelector("output");
  if (!window.DecompressionStream) {
    status.textContent = t.browser_old;
    return () => {};
  }
  const questions = await unpack(document.getElementById("packed").textContent);
  const perPage = 5;
  let start = 0;
  const fits = (question, name) => filters[name](question.runs[0], question.runs.slice(1).filter((run, i) => run && shown(i)));

  function show() {
    const chosen = filter.value || "all";
    filter.replaceChildren(...Object.keys(filters).map((name) => {
      const count = questions.filter((question) => fits(question, name)).length;
      return element("option", { value: name, textContent: `${t[`filter_${name}`]} (${count})`, selected: name === chosen });
    }));
    const wanted = search.value.toLowerCase();
    const found = questions.filter((question) => fits(question, chosen) && question.question.toLowerCase().includes(wanted));
    start = Math.max(0, Math.min(start, found.length - 1));
    start -= start % perPage;
    const some = found.slice(start, start + perPage);
    status.textContent = some.length ? say("range", { first: start + 1, last: start + some.length, count: found.length }) : t.range_empty;
    previous.disabled = start === 0;
    next.disabled = start + perPage >= found.length;
    document.getElementById("samples").replaceChildren(...some.map((question) => element("article", { className: "sample" },
      element("h3", { textContent: question.id }),
      element("p", { textContent: question.question }),
      element("small", { textContent: say("gold", question) }),
      element("div", { className: "answers" }, ...question.runs.map((sample, i) => (i === 0 || shown(i - 1) ? answer(sample, i - 1) : null))),
    )));
  }

  const restart = () => { start = 0; show(); };
  form.addEventListener("submit", (event) => event.preventDefault());
  filter.addEventListener("change", restart);
  search.addEventListener("input", restart);
  previous.addEventListener("click", () => { start -= perPage; show(); });
  next.addEventListener("click", () => { start += perPage; show(); });
  show();
  return show;
}

// Everything together

function drawAll() {
  drawCurves();
  if (document.getElementById("plot-evaluation")) drawEvaluation(); // not there when nothing was evaluated
  if (document.getElementById("plot-cost")) drawCost();
}

function showSmoothing() {
  const width = Number(controls.elements.smoothing.value);
  controls.querySelector("output").textContent = width > 1 ? say("smoothing_steps", { count: width }) : t.smoothing_off;
}

async function start() {
  const { smoothing } = controls.elements;
  smoothing.max = Math.max(50, page.smoothing);
  smoothing.value = page.smoothing;
  showSmoothing();
  drawAll();
  linkHover();
  let showCompletions = () => {};
  controls.addEventListener("submit", (event) => event.preventDefault());
  controls.addEventListener("input", (event) => {
    if (event.target.name !== "run") {
      showSmoothing();
      drawCurves();
      return;
    }
    const run = Number(event.target.value);
    if (event.target.checked) hidden.delete(run);
    else hidden.add(run);
    for (const node of document.querySelectorAll("[data-run]")) {
      node.hidden = node.dataset.run.split(" ").some((index) => index !== "" && hidden.has(Number(index)));
    }
    drawAll();
    showCompletions();
  });
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", drawAll);
  showCompletions = await completions(); // last: unpacking takes a while, and the controls work meanwhile
}

start();
