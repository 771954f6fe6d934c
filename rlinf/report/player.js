"use strict";
/* Episode player. The page calls rlinfPlayer with the list of episodes (see ``_episode`` in episode_player.py). Each recording is a
   script that calls rlinfEpisode; it is loaded when the episode is first shown. */

const rlinfRecordings = new Map();  // source -> promise of a recording

function rlinfEpisode(recording) {
  document.currentScript.rlinfRecording = recording;
}

function rlinfLoad(source) {
  if (!rlinfRecordings.has(source)) {
    rlinfRecordings.set(source, new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.onload = () => resolve(script.rlinfRecording);
      script.onerror = () => { rlinfRecordings.delete(source); reject(new Error(`${source} cannot be read`)); };
      script.src = source;
      document.head.append(script);
    }));
  }
  return rlinfRecordings.get(source);
}

function rlinfPlayer(episodes) {
  const FRAME_MS = 170;
  const CHARTS = [["value", "value"], ["entropy", "entropy of the chunk (nat)"], ["logprob", "log-probability of the chunk (nat)"]];
  const section = document.querySelector(".player");
  const shown = section.querySelector(".shown");
  const buttons = [...section.querySelectorAll("[data-episode]")];
  let current = null, timer = null;

  /* Create an element from its name, attributes and children (nodes or strings). */
  function make(name, attributes = {}, ...children) {
    const inSvg = /^(svg|g|polyline|circle|rect|line|text)$/.test(name);
    const element = inSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  function badge(success) {
    if (success === null) return "";
    return make("span", {class: `badge ${success ? "yes" : "no"}`}, success ? "success" : "failure");
  }

  function format(number) {
    return number === null ? "unknown" : Number(number).toPrecision(3);
  }

  /* Return the policy call that produced the action executed after `step` env steps. */
  function callAt(recording, step) {
    const calls = recording.calls.filter(call => call.step <= step);
    return calls[calls.length - 1];
  }

  function points(path) {
    return path.filter(point => point !== null).map(point => point.map(x => x.toFixed(2)).join(",")).join(" ");
  }

  function makeSide(about, recording) {
    const image = make("img", {alt: "", width: recording.size, height: recording.size});
    const overlay = make("svg", {class: "overlay", viewBox: `0 0 ${recording.size} ${recording.size}`});
    const numbers = make("p", {class: "numbers"});
    const bars = make("svg", {class: "bars", preserveAspectRatio: "none"});
    const ended = about.as_counted ? [] : [make("p", {class: "note"}, "Ended differently than in the evaluation.")];
    const caption = make("figcaption", {}, make("i", {class: `c${about.colour}`}), make("b", {}, about.name), badge(about.success));
    const figure = make("figure", {class: `side k${about.colour}`}, caption, make("div", {class: "image"}, image, overlay),
      numbers, bars, ...ended);
    return {about, recording, image, overlay, numbers, bars, figure};
  }

  function drawOverlay(side, call, done) {
    side.overlay.replaceChildren();
    if (call.path === null) return;
    const unit = side.recording.size / 224, ahead = call.path.slice(done);
    side.overlay.append(make("polyline", {class: "passed", points: points(call.path.slice(0, done + 1)), "stroke-width": 1.5 * unit}));
    side.overlay.append(make("polyline", {class: "halo", points: points(ahead), "stroke-width": 4 * unit}));
    side.overlay.append(make("polyline", {class: "ahead", points: points(ahead), "stroke-width": 2 * unit}));
    for (const point of ahead.filter(point => point !== null)) {
      side.overlay.append(make("circle", {cx: point[0], cy: point[1], r: 2.6 * unit}));
    }
  }

  function drawBars(side, call, done) {
    const {low, high} = side.recording, count = call.chunk.length, width = low.length;
    const largest = Math.max(1e-9, ...call.chunk.flat().map(Math.abs));
    side.bars.setAttribute("viewBox", `0 0 ${count * (width + 1)} 2`);
    side.bars.replaceChildren(make("line", {x1: 0, x2: count * (width + 1), y1: 1, y2: 1}));
    call.chunk.forEach((action, position) => action.forEach((number, place) => {
      const middle = (high[place] + low[place]) / 2, half = (high[place] - low[place]) / 2;
      const fraction = isFinite(half) && half > 0 ? (number - middle) / half : number / largest;
      const height = Math.max(-1, Math.min(1, fraction));
      side.bars.append(make("rect", {
        class: position < done ? "passed" : position === done ? "next" : "ahead", x: position * (width + 1) + place + 0.5, width: 0.8,
        y: height > 0 ? 1 - height : 1, height: Math.max(0.02, Math.abs(height)),
      }));
    }));
  }

  function drawSide(side, step) {
    const {recording} = side, last = recording.rewards.length, at = Math.min(step, last), call = callAt(recording, at);
    const done = Math.min(at - call.step, call.chunk.length);
    side.image.src = recording.frames[at];
    drawOverlay(side, call, done);
    drawBars(side, call, done);
    const reward = at > 0 ? `reward ${format(recording.rewards[at - 1])}` : "start";
    const place = at < last ? `action ${done + 1} of ${call.chunk.length}` : "ended";
    const scores = `value ${format(call.value)}, entropy ${format(call.entropy)}, log-prob ${format(call.logprob)}`;
    side.numbers.textContent = `step ${at} of ${last}, ${place}, ${reward}; ${scores}`;
  }

  function makeChart(name, title, sides, length) {
    const WIDTH = 300, HEIGHT = 84, LEFT = 44, TOP = 8, BOTTOM = 14;
    const usable = side => side.recording.calls.filter(call => call[name] !== null && isFinite(call[name]));
    const all = sides.flatMap(usable).map(call => call[name]);
    const heading = make("h3", {}, title);
    if (!all.length) return {element: make("div", {}, heading, make("p", {class: "note"}, "Not available for this policy.")), move() {}};
    let low = Math.min(...all), high = Math.max(...all);
    if (high - low < 1e-9) { low -= 0.5; high += 0.5; }
    const x = step => LEFT + (WIDTH - LEFT - 6) * step / Math.max(1, length);
    const y = number => TOP + (HEIGHT - TOP - BOTTOM) * (high - number) / (high - low);
    const svg = make("svg", {class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "data-chart": name});
    for (const number of [low, high]) {
      svg.append(make("line", {class: "grid", x1: LEFT, x2: WIDTH - 6, y1: y(number), y2: y(number)}));
      svg.append(make("text", {x: LEFT - 5, y: y(number) + 4, "text-anchor": "end"}, format(number)));
    }
    for (const side of sides) {
      const calls = usable(side), ends = side.recording.rewards.length;
      const corners = calls.flatMap((call, i) => [call.step, i + 1 < calls.length ? calls[i + 1].step : ends].map(step => [step, call[name]]));
      const line = corners.map(([step, number]) => `${x(step).toFixed(1)},${y(number).toFixed(1)}`).join(" ");
      svg.append(make("polyline", {class: `curve s${side.about.colour}`, points: line}));
    }
    const cursor = make("line", {class: "cursor", y1: TOP - 4, y2: HEIGHT - BOTTOM + 4});
    svg.append(cursor, make("text", {x: LEFT, y: HEIGHT - 1}, "step 0"),
      make("text", {x: WIDTH - 6, y: HEIGHT - 1, "text-anchor": "end"}, String(length)));
    const move = step => { cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step)); };
    return {element: make("div", {}, heading, svg), move};
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    if (current !== null) current.play.textContent = "Play";
  }

  function go(step) {
    current.step = Math.max(0, Math.min(current.length, step));
    current.slider.value = current.step;
    current.count.textContent = `step ${current.step} of ${current.length}`;
    current.sides.forEach(side => drawSide(side, current.step));
    current.charts.forEach(chart => chart.move(current.step));
    section.dataset.step = current.step;
  }

  function toggle() {
    if (timer !== null) return stop();
    if (current.step === current.length) go(0);
    current.play.textContent = "Pause";
    timer = setInterval(() => {
      go(current.step + 1);
      if (current.step === current.length) stop();
    }, FRAME_MS);
  }

  function button(text, label, act) {
    const made = make("button", {type: "button", "aria-label": label}, text);
    made.addEventListener("click", act);
    return made;
  }

  function show(number, recordings) {
    stop();
    const episode = episodes[number], sides = episode.sides.map((about, i) => makeSide(about, recordings[i]));
    const length = Math.max(...recordings.map(recording => recording.rewards.length));
    const slider = make("input", {type: "range", min: 0, max: length, step: 1, "aria-label": "env step"});
    const track = make("div", {class: "track"}, slider);
    const charts = CHARTS.map(([name, title]) => makeChart(name, title, sides, length));
    const play = button("Play", "play or pause", toggle), count = make("span", {class: "count"});
    const controls = make("div", {class: "controls"}, button("\u25C0", "one step back", () => { stop(); go(current.step - 1); }), play,
      button("\u25B6", "one step forward", () => { stop(); go(current.step + 1); }), track, count);
    current = {sides, charts, slider, play, count, length, step: 0};
    slider.addEventListener("input", () => { stop(); go(Number(slider.value)); });
    const notes = [];
    if (episode.divergence !== null) {
      const place = 100 * Math.min(1, episode.divergence / Math.max(1, length));
      track.append(make("i", {class: "divergence", style: `left: calc(8px + (100% - 16px) * ${place / 100})`, title: "they diverge here"}));
      controls.append(button(`They diverge at step ${episode.divergence}`, "go to where they diverge", () => { stop(); go(episode.divergence); }));
    } else if (sides.length > 1) {
      notes.push(make("p", {class: "note"}, "No action dimension differs by more than 10 % of its range."));
    }
    if (episode.same_start === null) {
      notes.push(make("p", {class: "note"}, "The first images were not compared because they differ in size."));
    }
    if (episode.same_start === false) notes.push(make("p", {class: "note"}, "The two episodes start with different images."));
    shown.replaceChildren(make("h3", {}, episode.instruction), make("div", {class: "sides"}, ...sides.map(side => side.figure)),
      controls, ...notes, make("div", {class: "scores"}, ...charts.map(chart => chart.element)));
    go(0);
    section.dataset.shown = number;
  }

  function open(number) {
    stop();
    buttons.forEach((button, i) => button.setAttribute("aria-current", i === number));
    section.dataset.episode = number;
    delete section.dataset.shown;
    Promise.all(episodes[number].sides.map(side => rlinfLoad(side.source))).then(
      recordings => { if (Number(section.dataset.episode) === number) show(number, recordings); },
      error => { shown.replaceChildren(make("p", {class: "note"}, error.message)); current = null; section.dataset.shown = number; });
  }

  buttons.forEach((button, number) => button.addEventListener("click", () => { open(number); section.focus({preventScroll: true}); }));
  section.addEventListener("keydown", event => {
    const acts = {ArrowLeft: () => go(current.step - 1), ArrowRight: () => go(current.step + 1), " ": toggle};
    const isOwn = event.target.matches("input") || (event.key === " " && event.target.matches("button"));
    if (current === null || isOwn || !(event.key in acts)) return;
    event.preventDefault();
    if (event.key !== " ") stop();
    acts[event.key]();
  });
  open(0);
}
