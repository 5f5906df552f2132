"""The look and the behaviour of a report: style for light and dark, and what a press does."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fff; --ink: #1a1a1a; --soft: #595959; --line: #d8d8d8; --card: #f6f6f6;
  --accent: #0064a4;
  font-family: system-ui, sans-serif; line-height: 1.5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #16181b; --ink: #e8e8e8; --soft: #a8a8a8; --line: #3a3d42; --card: #202327;
    --accent: #7cc4f5;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--ground);
  color: var(--ink); overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; border-top: 1px solid var(--line);
  padding-top: 1rem; }
a { color: var(--accent); }
a:focus-visible, button:focus-visible, summary:focus-visible { outline: 3px solid var(--accent);
  outline-offset: 2px; }
nav ol { padding-left: 1.3rem; }
.soft { color: var(--soft); font-size: .9rem; }
.finding { background: var(--card); border-left: 4px solid var(--accent); padding: .7rem 1rem;
  white-space: pre-line; }
pre { background: var(--card); padding: .7rem; overflow-x: auto; font-size: .8rem; }
figure { margin: 1rem 0; }
figure img { max-width: 100%; height: auto; background: #fff; padding: .3rem; border-radius: 4px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
details { margin: .6rem 0; }
summary { cursor: pointer; }
.download { display: inline-block; padding: .35rem .8rem; border: 1px solid var(--accent);
  border-radius: 4px; text-decoration: none; }
.tl-gallery { display: grid; gap: .6rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 17rem), 1fr)); }
.tl-gallery button { padding: .3rem; background: var(--card); color: inherit; cursor: pointer;
  border: 1px solid var(--line); border-radius: 4px; font: inherit; font-size: .8rem; }
.tl-gallery button[aria-pressed=true] { border-color: var(--accent); box-shadow: 0 0 0 1px
  var(--accent); }
.tl-gallery img { width: 100%; display: block; background: #fff; image-rendering: pixelated; }
.tl-large { margin: 1rem 0; overflow-x: auto; }
.tl-large .tl-widget-view { min-width: 40rem; }
.tl-widget { overflow-x: auto; }
"""

# Draws the head whose thumbnail is pressed, from its 16-bit numbers, into a box of its own: the
# library makes a root of a box once and for all.
SCRIPT = """
(function () {
  function maps(data, head) {
    var bytes = Uint8Array.from(atob(head.maps), function (c) { return c.charCodeAt(0); });
    var levels = new DataView(bytes.buffer), n = data.tokens.length;
    var unit = head.scale / data.levels;
    return data.names.map(function (_, map) {
      return data.tokens.map(function (_, query) {
        return data.tokens.map(function (_, key) {
          var value = levels.getInt16(2 * ((map * n + query) * n + key), true) * unit;
          return Number(value.toPrecision(4));
        });
      });
    });
  }
  function show(button) {
    var name = button.dataset.gallery, large = document.getElementById(name + "-large");
    var data = JSON.parse(document.getElementById(name + "-data").textContent);
    var head = data.heads[Number(button.dataset.head)];
    document.querySelectorAll("#" + name + " button").forEach(function (other) {
      other.setAttribute("aria-pressed", String(other === button));
    });
    var title = document.createElement("p"), box = document.createElement("div");
    title.textContent = head.name + ", in full colour from " + head.shade;
    box.id = name + "-" + head.name + "-" + Date.now();
    box.className = "tl-widget-view";
    large.replaceChildren(title, box);
    window.CircuitsVis.render(box.id, CircuitsVis.AttentionHeads, {
      attention: maps(data, head),
      attentionHeadNames: data.names.map(function (what) { return head.name + " " + what; }),
      tokens: data.tokens,
      minValue: -head.shade, maxValue: head.shade,
      negativeColor: data.negative, positiveColor: data.positive, maskUpperTri: head.causal
    });
    large.focus({ preventScroll: true });
    large.scrollIntoView({ block: "nearest" });
  }
  document.addEventListener("click", function (event) {
    var button = event.target.closest("button[data-head]");
    if (button) { show(button); }
  });
})();
"""
