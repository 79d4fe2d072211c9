// Arrays of numbers from their bytes: what encoded() of filling.py wrote.
function arrays(encoded) {
  const KINDS = { i: Int32Array, d: Float64Array, b: Uint8Array }, found = {};
  for (const [name, [kind, text]] of Object.entries(encoded)) {
    const binary = atob(text), bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    found[name] = new KINDS[kind](bytes.buffer);
  }
  return found;
}

// Round numbers from one end to the other, so many at most.
function ticks(from, to, wanted) {
  const rough = (to - from) / Math.max(1, wanted) || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to + step * 1e-9; k++)
    found.push(Number((k * step).toPrecision(12)));
  return found;
}

// Seconds, in a unit that suits all that is in sight.
function duration(seconds, sight) {
  const size = seconds === 0 ? sight : Math.max(Math.abs(seconds), sight / 10);
  const [scale, unit] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${Number((seconds * scale).toPrecision(6))} ${unit}`;
}

const count = (number) => number.toLocaleString("en-US");
