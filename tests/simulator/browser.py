"""Pages in a stand-in for a browser: node runs their script over elements that note all calls."""

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node on the PATH")

_DTYPES = {"i": "<i4", "d": "<f8", "b": "u1"}

_BROWSER = """
const page = require("fs").readFileSync(process.argv[1], "utf8");
const data = page.match(/<script id="data"[^>]*>([^]*?)<\\/script>/)[1];
const code = page.match(/<script>\\n([^]*?)<\\/script>/)[1];
const made = [];
const element = (name) => {
  const painted = {};
  const pen = new Proxy({}, { get: (has, key) => key in has ? has[key] : (...size) => {
    if (key === "fillRect") painted[has.fillStyle] = (painted[has.fillStyle] || 0) + size[2];
  } });
  const one = { name, style: {}, attributes: {}, on: {}, offsetWidth: 10, painted, words: "",
    setAttribute(key, value) { one.attributes[key] = value; }, getContext: () => pen,
    appendChild(kid) { return kid; }, append(text) { one.words += text; }, replaceWith() {},
    addEventListener(what, act) { one.on[what] = act; },
    getBoundingClientRect: () => ({ left: 0, top: 0, width: 1060 }) };
  made.push(one);
  return one;
};
const found = { data: { textContent: data } };
for (const [, id] of page.matchAll(/id="(\\w+)"/g)) found[id] ??= element(id);
const document = { getElementById: (id) => found[id], createElement: element,
  createElementNS: (space, name) => element(name), documentElement: {} };
const style = () => ({ getPropertyValue: (name) => ` ${name}` });
new Function("document", "innerWidth", "getComputedStyle", code)(document, 1100, style);
const canvas = made.filter((one) => one.name === "canvas").at(-1);
const painted = { ...canvas?.painted }, tips = [];
const at = (x, y) => ({ clientX: x, clientY: y, preventDefault() {} });
const tipOf = (one, what, event) => {
  if (one.on[what]) { one.on[what](event); tips.push(found.tip.textContent); }
};
const said = (key) => {
  canvas.on.keydown({ key, preventDefault() {} });
  return found.said.textContent;
};
const [points, keys] = JSON.parse(process.argv[2]);
for (const [x, y] of points) {
  if (canvas) tipOf(canvas, "pointermove", at(x, y));
  else for (const one of made) tipOf(one, "mousemove", at(x, y));
}
const spoken = keys.map(said);
if (canvas) {
  canvas.on.wheel({ ...at(800, 9), deltaY: -500, ctrlKey: true });
  canvas.on.wheel({ ...at(800, 9), deltaY: -500, ctrlKey: true, shiftKey: true });
  canvas.on.pointerdown(at(800, 9)); canvas.on.pointermove(at(700, 9)); canvas.on.pointerup();
  canvas.on.dblclick();
  for (const one of made.filter((one) => one.name === "button")) one.on.click();
}
console.log(JSON.stringify({ painted, tips, spoken,
  buttons: made.filter((one) => one.name === "button").map((one) => one.attributes["aria-pressed"]),
  legend: made.filter((one) => ["span", "button"].includes(one.name)).map((one) => one.words),
  shapes: made.map((one) => [one.name, one.attributes, one.textContent ?? ""]),
  labels: made.flatMap((one) => one.name === "canvas" ? [one.attributes["aria-label"]] : []) }));
"""


def seen_on(path: Path, points: Any = (), keys: Any = ()) -> dict[str, Any]:
    """What a page draws, says where the pointer is at `points` and when `keys` are pressed."""
    command = ["node", "-e", _BROWSER, str(path), json.dumps([list(points), list(keys)])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def data_of(page: str) -> dict[str, Any]:
    """What a page draws from."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def array_of(arrays: dict[str, Any], name: str) -> Any:
    """One of the arrays of a page's data."""
    kind, text = arrays[name]
    return np.frombuffer(base64.b64decode(text), dtype=_DTYPES[kind])


def foreign(page: str) -> list[str]:
    """What a page would load, or where it would lead."""
    page = page.replace("http://www.w3.org/2000/svg", "")  # a name
    return re.findall(r"(?:src|href)=|https?://|@import|fetch\(|url\(|XMLHttpRequest", page)
