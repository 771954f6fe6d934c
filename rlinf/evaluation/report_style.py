"""The style sheet of the report; light or dark as the reader's system is."""

CSS = """
:root { color-scheme: light dark;
  --page: #f5f6f8; --card: #ffffff; --ink: #1b1f27; --soft: #5d6675; --line: #e3e6eb; --track: #e8ebf0;
  --c1: #2b6cd9; --c2: #d9772b; --c3: #14916f; --c4: #9057c9; --c5: #c2356f; --c6: #7a8518;
  --c7: #0f8aa8; --c8: #7d6552; --good: #14804a; --good-bg: #e2f5ea; --bad: #b03434;
  --bad-bg: #fbe7e7; }
@media (prefers-color-scheme: dark) { :root {
  --page: #13161b; --card: #1c2027; --ink: #e8eaef; --soft: #9aa3b2; --line: #2d333d; --track: #2d333d;
  --c1: #6ea4ff; --c2: #f2a262; --c3: #45c9a2; --c4: #bd93ea; --c5: #f27aa8; --c6: #c3cf5a;
  --c7: #58c7e0; --c8: #c4a88f; --good: #63d297; --good-bg: #17372a; --bad: #f08a8a;
  --bad-bg: #402325; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 27px; letter-spacing: -0.01em; margin: 0 0 6px; }
h2 { font-size: 18px; margin: 40px 0 14px; }
h3 { font-size: 14px; margin: 0 0 8px; font-weight: 600; }
p.note, .foot { color: var(--soft); font-size: 13px; margin: 6px 0 0; }
.facts { display: flex; flex-wrap: wrap; gap: 6px 18px; margin-bottom: 10px; color: var(--soft); font-size: 13.5px; }
.facts b { color: var(--ink); font-weight: 600; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; }
.headline { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 14px; margin-top: 24px; }
.headline .name { color: var(--soft); font-size: 13.5px; }
.headline .value { font-size: 40px; font-weight: 650; letter-spacing: -0.02em; line-height: 1.15;
  font-variant-numeric: tabular-nums; }
.headline .detail { color: var(--soft); font-size: 13px; font-variant-numeric: tabular-nums; }
.headline .interval { margin-top: 8px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr)); gap: 14px; margin-top: 14px; }
.charts.small { grid-template-columns: repeat(auto-fill, minmax(min(330px, 100%), 1fr)); }
.chart { display: block; width: 100%; height: auto; }
.chart text { font-size: 11px; fill: var(--soft); font-family: inherit; font-variant-numeric: tabular-nums; }
.chart .label { font-size: 11.5px; }
.chart .grid { stroke: var(--line); }
.chart .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.chart .bar { fill: none; stroke-width: 1.4; opacity: .75; }
.chart .strip { fill: transparent; }
.chart .tip { display: none; pointer-events: none; }
.chart .hit:hover .tip { display: block; }
.chart .tip line { stroke: var(--soft); stroke-dasharray: 3 3; }
.chart .tip rect { fill: var(--card); stroke: var(--line); }
.chart .tip text { fill: var(--ink); }
.s1 { stroke: var(--c1); } .s2 { stroke: var(--c2); } .s3 { stroke: var(--c3); } .s4 { stroke: var(--c4); }
.s5 { stroke: var(--c5); } .s6 { stroke: var(--c6); } .s7 { stroke: var(--c7); } .s8 { stroke: var(--c8); }
.chart .area { stroke: none; opacity: .16; } .area.s1 { fill: var(--c1); } .area.s2 { fill: var(--c2); } .area.s3 { fill: var(--c3); }
.area.s4 { fill: var(--c4); } .area.s5 { fill: var(--c5); } .area.s6 { fill: var(--c6); } .area.s7 { fill: var(--c7); }
.area.s8 { fill: var(--c8); }
.dot { stroke: var(--card); stroke-width: 1.2; }
.dot.s1 { fill: var(--c1); } .dot.s2 { fill: var(--c2); } .dot.s3 { fill: var(--c3); } .dot.s4 { fill: var(--c4); }
.dot.s5 { fill: var(--c5); } .dot.s6 { fill: var(--c6); } .dot.s7 { fill: var(--c7); } .dot.s8 { fill: var(--c8); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 12.5px; color: var(--soft); margin: 0 0 6px; }
.legend i { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px;
  vertical-align: middle; }
.legend .c1 { background: var(--c1); } .legend .c2 { background: var(--c2); } .legend .c3 { background: var(--c3);
  } .legend .c4 { background: var(--c4); } .legend .c5 { background: var(--c5); } .legend .c6 { background: var(--c6); }
.legend .c7 { background: var(--c7); } .legend .c8 { background: var(--c8); }
.interval { width: 160px; height: 16px; display: inline-block; vertical-align: middle; overflow: visible; }
.interval .track { fill: var(--track); }
.interval .range { stroke: none; opacity: .38; }
.interval .range.s1 { fill: var(--c1); } .interval .range.s2 { fill: var(--c2); } .interval .range.s3 { fill: var(--c3); }
.interval .range.s4 { fill: var(--c4); } .interval .range.s5 { fill: var(--c5); } .interval .range.s6 { fill: var(--c6); }
.interval .zero { stroke: var(--soft); stroke-width: 1; }
.warning { margin-top: 14px; border-color: var(--bad); } .warning ul { margin: 0; padding-left: 20px; font-size: 14px; }
.scroll { overflow-x: auto; }
.player { display: grid; grid-template-columns: 250px minmax(0, 1fr); gap: 20px; outline: none; }
.player button { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 4px 12px; cursor: pointer; }
.player button:hover, .player button[aria-current="true"] { background: var(--track); }
.episodes { display: flex; flex-direction: column; gap: 6px; max-height: 660px; overflow-y: auto; padding: 2px; }
.episodes button { display: flex; justify-content: space-between; gap: 8px; text-align: left; font-size: 13px; line-height: 1.35; }
.episodes small { display: block; color: var(--soft); } .episodes .badges { display: grid; gap: 3px; align-content: start; }
.sides { display: flex; flex-wrap: wrap; gap: 12px; } .side { margin: 0; flex: 1 1 140px; max-width: 460px; min-width: 0; }
.side figcaption { display: flex; gap: 8px; align-items: center; font-size: 13px; margin-bottom: 6px; }
.side figcaption i { width: 14px; height: 3px; border-radius: 2px; flex: none; } .side figcaption b { font-weight: 600; }
.side .c1 { background: var(--c1); } .side .c2 { background: var(--c2); }
.picture { position: relative; line-height: 0; border-radius: 6px; overflow: hidden; }
.picture img { width: 100%; height: auto; display: block; } .overlay { position: absolute; inset: 0; width: 100%; height: 100%; }
.overlay polyline { fill: none; stroke-linecap: round; stroke-linejoin: round; } .overlay .halo { stroke: #000; opacity: .55; }
.overlay .passed { stroke: #fff; opacity: .6; } .overlay .ahead { stroke: #ffd84d; }
.overlay circle { fill: #ffd84d; stroke: #000; stroke-width: .6; }
.numbers { font-size: 12.5px; color: var(--soft); margin: 6px 0; min-height: 3.1em; font-variant-numeric: tabular-nums; }
.bars { display: block; width: 100%; height: 44px; } .bars line { stroke: var(--line); stroke-width: .04; }
.bars rect { fill: var(--c3); } .bars .passed { opacity: .25; } .bars .ahead { opacity: .6; }
.controls { display: flex; align-items: center; gap: 8px; margin: 12px 0 8px; flex-wrap: wrap; font-size: 13.5px; }
.controls .track { position: relative; flex: 1 1 160px; } .controls input { width: 100%; margin: 0; display: block; }
.controls .count { color: var(--soft); font-variant-numeric: tabular-nums; }
.parting { position: absolute; top: -7px; width: 2px; height: 9px; background: var(--bad); pointer-events: none; }
.judged { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(230px, 100%), 1fr)); gap: 12px; margin-top: 14px; }
.judged h3 { font-size: 12.5px; font-weight: 600; color: var(--soft); margin: 0; } .judged .chart { overflow: visible; }
.chart .cursor { stroke: var(--ink); stroke-width: 1; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12.5px; padding: 4px 14px 8px 0;
  border-bottom: 1px solid var(--line); }
td { padding: 8px 14px 8px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.wrap { white-space: normal; min-width: 160px; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 70px; vertical-align: top; font-size: 13px; }
td img { width: 96px; margin: 2px; vertical-align: top; }
h1, td.wrap, figcaption, .facts, .warning, p.note { overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
tr.total td { font-weight: 650; }
td small { color: var(--soft); margin-left: 8px; font-weight: 400; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); gap: 14px; }
.gallery figure { margin: 0; padding: 0; overflow: hidden; }
.gallery video { display: block; width: 100%; background: #000; }
.gallery figcaption { padding: 9px 12px 11px; font-size: 13px; display: flex; justify-content: space-between;
  gap: 8px; align-items: baseline; }
figcaption small { display: block; color: var(--soft); }
.badge { font-size: 12px; border-radius: 20px; padding: 1px 9px; font-weight: 600; white-space: nowrap; flex: none; }
.badge.yes { color: var(--good); background: var(--good-bg); } .badge.no { color: var(--bad);
  background: var(--bad-bg); }
h4 { font-size: 14px; color: var(--soft); margin: 18px 0 10px; font-weight: 600; }
details { margin-top: 12px; } summary { cursor: pointer; font-weight: 600; }
@media (max-width: 640px) { .player { grid-template-columns: minmax(0, 1fr); } .episodes { max-height: 210px; }
  main { padding: 20px 14px 40px; } td { white-space: normal; } td.wrap { min-width: 90px; }
  td .interval { display: none; } td small { margin-left: 0; } }
pre { overflow: auto; max-height: 480px;
  font: 12.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: 12px 0 0; }
"""
