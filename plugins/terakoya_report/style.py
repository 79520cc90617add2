"""The style sheet of a report's page."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2022; --quiet: #5f6b6d; --paper: #fff; --rule: #dfe3e4; --mark: #fff3cf;
  --bad: #b3261e; --good: #1d7a3e;
  --c0: #4363d8; --c1: #d26a00; --c2: #2e8b57; --c3: #b8336a; --c4: #7a5195; --c5: #5f6b6d; --c6: #0086a8;
  --c7: #8a6d00 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ea; --quiet: #9aa5a8; --paper: #15191b; --rule: #323a3d;
  --mark: #4a3d12; --bad: #ff8a80; --good: #6fd08c;
  --c0: #8aa2ff; --c1: #ffa24d; --c2: #63cf96; --c3: #f077a8; --c4: #c39be0; --c5: #aab6b9; --c6: #4cc6e6;
  --c7: #d9bb4a }}
body { font: 15px/1.6 system-ui, "Hiragino Sans", "Noto Sans JP", sans-serif; margin: 2rem auto; max-width: 84rem;
  padding: 0 1rem; color: var(--ink); background: var(--paper) }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem } h3 { font-size: 1rem; margin: 0 0 .2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } .wide { overflow-x: auto }
th, td { padding: .2rem 1.2rem .2rem 0; text-align: left; vertical-align: top; overflow-wrap: anywhere }
th { font-weight: 600 } tbody th { font-weight: 400; color: var(--quiet); white-space: nowrap }
thead th { border-bottom: 2px solid var(--rule) } tbody td, tbody th { border-bottom: 1px solid var(--rule) }
tr.differs td { background: var(--mark) } .quiet, svg .quiet { color: var(--quiet); fill: var(--quiet) }
.bad { color: var(--bad) } .good { color: var(--good) } code { font-size: .92em }
.legend { position: sticky; top: 0; background: var(--paper); padding: .4rem 0; z-index: 1 }
.legend label { margin-right: 1.4rem; white-space: nowrap }
.dot { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin: 0 .4rem 0 .2rem;
  vertical-align: -1px; background: var(--colour) }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); gap: 1.4rem 2rem }
.charts.small { grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)) }
figure { margin: 0 } svg { width: 100%; height: auto; display: block }
svg text { font: 12px system-ui, sans-serif; fill: var(--quiet) } svg .grid { stroke: var(--rule) }
svg .axis { stroke: var(--quiet) } .curve polyline { fill: none; stroke: var(--colour); stroke-width: 1.3 }
.curve circle { fill: var(--colour) } .curve.check polyline { stroke-width: 2 } .measured { opacity: .3 }
.controls label { margin-right: 1.4rem } .controls input { vertical-align: middle }
.dash0 polyline { stroke-dasharray: 6 3 }
.dash1 polyline { stroke-dasharray: 2 3 } .dash2 polyline { stroke-dasharray: 9 3 2 3 }
.dash3 polyline { stroke-dasharray: 1 2 }
.anomaly { fill: var(--colour) }
svg.key { display: inline-block; width: 2.6rem; height: .5rem; margin: 0 .3rem 0 .6rem; vertical-align: 2px;
  --colour: var(--quiet) }
.restart { stroke: var(--colour); stroke-dasharray: 2 4; stroke-width: 1.2 }
.pointer line { stroke: var(--quiet) } .pointer rect { fill: var(--paper); stroke: var(--rule) }
.pointer text { fill: var(--ink) } .pointer rect.chosen { fill: var(--quiet); fill-opacity: .2; stroke: none }
svg.chart { touch-action: pan-y; user-select: none; cursor: crosshair } summary { cursor: pointer; margin: .6rem 0 }
"""
