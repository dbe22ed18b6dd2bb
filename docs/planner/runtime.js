"use strict";
// What the translated arithmetic of plan.js stands on: Python's operators and builtins, and what stands
// in the simulation for memory and files, of which it has none.

const py = (() => {
  const iter = (x) => (x instanceof Map ? x.keys() : x && x.__iter__ ? x.__iter__() : x);
  const list = (x) => (x === undefined ? [] : Array.isArray(x) ? x : [...iter(x)]);
  const t = (x) => {
    if (Array.isArray(x)) return x.length > 0;
    if (x instanceof Map || x instanceof Set) return x.size > 0;
    if (x && x.__len__) return x.__len__() > 0;
    return Boolean(x);
  };
  const eq = (a, b) => {
    if (a === b || (a == null && b == null)) return true;
    if (Array.isArray(a) && Array.isArray(b)) return a.length === b.length && a.every((x, i) => eq(x, b[i]));
    if (a instanceof Set && b instanceof Set) return a.size === b.size && [...a].every((x) => b.has(x));
    if (typeof a === "boolean" || typeof b === "boolean") return Number(a) === Number(b) && typeof a !== "object" && typeof b !== "object" && typeof a !== "string" && typeof b !== "string";
    return false;
  };
  const lt = (a, b) => {
    if (!Array.isArray(a)) return a < b;
    for (let i = 0; i < Math.min(a.length, b.length); i++) if (!eq(a[i], b[i])) return lt(a[i], b[i]);
    return a.length < b.length;
  };
  const compare = (a, b) => (lt(a, b) ? -1 : lt(b, a) ? 1 : 0);
  // Each key is computed once, as in Python.
  const byKeys = (xs, key) => xs.map((x) => [key(x), x]).sort((a, b) => compare(a[0], b[0])).map(([, x]) => x);
  const has = (x, xs) => {
    if (xs instanceof Set || xs instanceof Map) return xs.has(x);
    if (typeof xs === "string") return xs.includes(x);
    return list(xs).some((y) => eq(x, y));
  };
  const ordered = (f, args, words) => {
    const all = [...args];
    for (const [name, value] of Object.entries(words || {})) {
      const at = (f.sig || []).indexOf(name);
      const others = (f.sig || []).indexOf("**");
      if (at < 0 && others >= 0) {
        all[others] = new Map([...(all[others] || []), [name, value]]);
        continue;
      }
      if (at < 0) throw new Error(`no parameter ${name} of ${f.name}`);
      all[at] = value;
    }
    return Array.from(all);
  };
  const call = (f, args, words) => {
    const all = words ? ordered(f, args, words) : args;
    return f.isClass ? new f(...all) : f(...all);
  };
  const method = (owner, name, args, words) => owner[name](...ordered(owner[name], args, words));
  const bound = (owner, name) => {
    const value = owner[name];
    if (typeof value !== "function" || value.isClass) return value;
    const f = value.bind(owner);
    f.sig = value.sig;
    return f;
  };
  const named = (f, sig) => { f.sig = sig; return f; };
  const replace = (old, words) =>
    Object.assign(Object.create(Object.getPrototypeOf(old)), ownFields(old), words);
  const ownFields = (x) => {
    const names = x.constructor.fields || Object.keys(x);
    return Object.fromEntries(names.map((name) => [name, x[name]]));
  };
  const once = (owner, name, make) => {
    const value = make();
    Object.defineProperty(owner, name, { value, enumerable: false });
    return value;
  };
  const keyOf = (x) => {
    if (x instanceof Set) return `{${[...x].sort((a, b) => a - b)}}`;
    return Array.isArray(x) ? `(${x.map(keyOf)})` : String(x);
  };
  const cached = (f) => {
    let known = new Map();
    return named((...args) => {
      const key = args.map(keyOf).join("|");
      if (!known.has(key)) {
        if (known.size > 4096) known = new Map();
        known.set(key, f(...args));
      }
      return known.get(key);
    }, f.sig);
  };
  const contextmanager = (f) => {
    function open(...args) {
      const steps = f.apply(this, args);
      return { enter: () => steps.next().value, exit: () => steps.next() };
    }
    return named(open, f.sig);
  };
  const best = (sign) => function (...args) {
    const items = args.length === 1 ? list(args[0]) : args;
    const key = (this && this.key) || ((x) => x);
    let chosen;
    let of;
    for (const item of items) {
      const value = key(item);
      if (chosen === undefined || sign * compare(value, of) < 0) { chosen = item; of = value; }
    }
    if (chosen === undefined) {
      if (this && "default" in this && this !== py) return this.default;
      throw new Error("no item");
    }
    return chosen;
  };
  const roundHalfEven = (x, digits = 0) => {
    const scaled = x * 10 ** digits;
    const low = Math.floor(scaled);
    const part = scaled - low;
    const whole = part < 0.5 ? low : part > 0.5 ? low + 1 : low % 2 ? low + 1 : low;
    return whole / 10 ** digits;
  };
  const format = (x, spec) => {
    if (!spec) return String(x);
    const [, width, comma, digits, kind] = /^0?(\d*)(,?)(?:\.(\d+))?([fgb]?)$/.exec(spec);
    if (kind === "b") return x.toString(2).padStart(Number(width), "0");
    if (kind === "g") return String(Number(Number(x).toPrecision(Number(digits))));
    const text = digits === undefined ? String(x) : Number(x).toFixed(Number(digits));
    if (!comma) return text;
    const [whole, fraction] = text.split(".");
    return whole.replace(/\B(?=(\d{3})+$)/g, ",") + (fraction ? `.${fraction}` : "");
  };
  const item = (x, key) => {
    if (x instanceof Map) {
      if (x.has(key)) return x.get(key);
      if (x.counts) return 0;
      throw new Error(`no key ${key}`);
    }
    return x[key < 0 ? x.length + key : key];
  };
  const slice = (x, from, to, step) => {
    const items = typeof x === "string" ? x : list(x);
    if (step === -1) return typeof x === "string" ? [...x].reverse().join("") : [...items].reverse();
    return items.slice(from === null ? 0 : from, to === null ? undefined : to);
  };
  const setOf = (x) => (x === undefined ? new Set() : new Set(iter(x)));
  const py = {
    iter, list, t, eq, lt, has, call, method, bound, named, replace, once, cached, contextmanager, format, item, slice,
    tuple: list, set: setOf, frozenset: setOf,
    ne: (a, b) => !eq(a, b),
    le: (a, b) => !lt(b, a),
    gt: (a, b) => lt(b, a),
    ge: (a, b) => !lt(a, b),
    hasnot: (x, xs) => !has(x, xs),
    both: (a, b) => (t(a) ? b() : a),
    either: (a, b) => (t(a) ? a : b()),
    add: (a, b) => (Array.isArray(a) ? [...a, ...b] : a + b),
    sub: (a, b) => (a instanceof Set || a instanceof Map ? new Set([...iter(a)].filter((x) => !has(x, b))) : a - b),
    mul: (a, b) => {
      if (typeof a === "string") return a.repeat(Number(b));
      if (Array.isArray(a)) return Array.from({ length: Math.max(0, Number(b)) }, () => a).flat();
      return Array.isArray(b) || typeof b === "string" ? py.mul(b, a) : a * b;
    },
    div: (a, b) => {
      if (b === 0) throw new Error("division by zero");
      return a / b;
    },
    floordiv: (a, b) => Math.floor(a / b),
    mod: (a, b) => ((a % b) + b) % b,
    shl: (a, b) => a * 2 ** b,
    shr: (a, b) => Math.floor(a / 2 ** b),
    pow: (a, b) => a ** b,
    or_: (a, b) => (a instanceof Map ? new Map([...a, ...b]) : a instanceof Set ? new Set([...a, ...b]) : a | b),
    and_: (a, b) => (a instanceof Set ? new Set([...a].filter((x) => has(x, b))) : a & b),
    set_: null,
    del: (x, key) => x.delete(key),
    object: (x) => (x instanceof Map ? Object.fromEntries(x) : x),
    enter: (manager) => manager.enter(),
    exit: (manager) => manager.exit(),
    abs: Math.abs,
    all: (xs) => { for (const x of iter(xs)) if (!t(x)) return false; return true; },
    any: (xs) => { for (const x of iter(xs)) if (t(x)) return true; return false; },
    bool: t,
    dict: (x) => (x === undefined ? new Map() : new Map(x)),
    enumerate: function* (xs, start = 0) { let i = start; for (const x of iter(xs)) yield [i++, x]; },
    filter: function* (f, xs) { for (const x of iter(xs)) if (t(f === null ? x : f(x))) yield x; },
    float: Number,
    getattr: (x, name, other) => (x[name] === undefined ? other : x[name]),
    hasattr: (x, name) => x[name] !== undefined,
    int: (x, base) => (base ? parseInt(x, base) : Math.trunc(Number(x))),
    isinstance: (x, kind) => {
      if (kind === py.int) return Number.isInteger(x);
      if (kind === py.str) return typeof x === "string";
      if (kind === py.tuple || kind === py.list) return Array.isArray(x);
      return x instanceof kind;
    },
    len: (x) => (x instanceof Map || x instanceof Set ? x.size : x.__len__ ? x.__len__() : x.length),
    map: function* (f, ...xs) {
      if (xs.length > 1) { for (const items of py.zip(...xs)) yield call(f, items); return; }
      for (const x of iter(xs[0])) yield call(f, [x]);
    },
    max: best(-1),
    min: best(1),
    next: (xs, other) => {
      const step = xs[Symbol.iterator]().next();
      if (step.done && other === undefined) throw new Error("nothing is left");
      return step.done ? other : step.value;
    },
    range: (a, b, step = 1) => {
      const [from, to] = b === undefined ? [0, a] : [a, b];
      const xs = [];
      for (let x = from; step > 0 ? x < to : x > to; x += step) xs.push(x);
      return xs;
    },
    reversed: (xs) => [...iter(xs)].reverse(),
    round: roundHalfEven,
    sorted: function (xs) {
      const key = (this && this.key) || ((x) => x);
      return byKeys([...iter(xs)], key);
    },
    str: String,
    sum: (xs, start = 0) => { let total = start; for (const x of iter(xs)) total += Number(x); return total; },
    type: (x) => (typeof x === "number" ? (Number.isInteger(x) ? py.int : py.float) : Array.isArray(x) ? py.tuple : typeof x === "boolean" ? py.bool : x == null ? null : x.constructor),
    zip: (...xs) => {
      const lists = xs.map((x) => [...iter(x)]);
      return lists.length ? lists[0].map((_, i) => lists.map((x) => x[i])).slice(0, Math.min(...lists.map((x) => x.length))) : [];
    },
    id: (x) => { if (!ids.has(x)) ids.set(x, ids.size_++); return ids.get(x); },
  };
  const ids = new WeakMap();
  ids.size_ = 0;
  // Methods of lists, sets, dictionaries and strings, or of an object of a class with such a method.
  const forms = {
    append: (x, y) => x.push(y),
    appendleft: (x, y) => x.unshift(y),
    add: (x, y) => x.add(y),
    clear: (x) => (Array.isArray(x) ? (x.length = 0) : x.clear()),
    copy: (x) => (x instanceof Map ? new Map(x) : [...x]),
    count: (x, y) => x.filter((z) => eq(z, y)).length,
    difference: (x, ...ys) => ys.reduce((a, b) => py.sub(a, setOf(b)), x),
    discard: (x, y) => x.delete(y),
    extend: (x, ys) => { for (const y of iter(ys)) x.push(y); },
    get: (x, key, other = null) => (x.has(key) ? x.get(key) : other),
    index: (x, y) => x.findIndex((z) => eq(z, y)),
    intersection: (x, ys) => py.and_(x, ys instanceof Set ? ys : setOf(ys)),
    union: (x, ...ys) => new Set([...x, ...ys.flatMap((y) => [...iter(y)])]),
    issuperset: (x, ys) => [...iter(ys)].every((y) => x.has(y)),
    issubset: (x, ys) => [...x].every((y) => has(y, ys)),
    items: (x) => [...x.entries()],
    keys: (x) => new Set(x.keys()),
    values: (x) => [...x.values()],
    pop: (x, key, other) => {
      if (!(x instanceof Map)) return key === undefined ? x.pop() : x.splice(key, 1)[0];
      const value = x.has(key) ? x.get(key) : other;
      x.delete(key);
      return value;
    },
    popleft: (x) => x.shift(),
    remove: (x, y) => (Array.isArray(x) ? x.splice(forms.index(x, y), 1) : x.delete(y)),
    setdefault: (x, key, value) => { if (!x.has(key)) x.set(key, value); return x.get(key); },
    update: (x, ys) => { for (const y of iter(ys)) x.add(y); },
    bit_length: (x) => (x ? Math.floor(Math.log2(x)) + 1 : 0),
    join: (x, ys) => [...iter(ys)].join(x),
    rstrip: (x) => x.trimEnd(),
  };
  const native = (x) => Array.isArray(x) || x instanceof Map || x instanceof Set || typeof x === "string" || typeof x === "number";
  for (const [name, form] of Object.entries(forms)) {
    const operator = py[name];
    py[name] = (x, ...rest) => {
      if (operator && (name !== "add" || !(x instanceof Set))) return operator(x, ...rest);
      return native(x) ? form(x, ...rest) : x[name](...rest);
    };
  }
  py.sort = function (xs) {
    const key = (this && this.key) || ((x) => x);
    byKeys(xs, key).forEach((x, at) => { xs[at] = x; });
  };
  const newSet = py.set;
  py.set = (x, key, value) => {
    if (value === undefined) return newSet(x);
    return x instanceof Map ? x.set(key, value) : (x[key < 0 ? x.length + key : key] = value);
  };
  return py;
})();

const stubs = (() => {
  class Exception extends Error {
    constructor(what = "", where = "", how = "") {
      super(what);
      Object.assign(this, { what, where, how });
    }
  }
  Exception.isClass = true;
  Exception.sig = ["what", "where", "how"];
  const kind = () => {
    const made = class extends Exception {};
    made.isClass = true;
    made.sig = Exception.sig;
    return made;
  };
  const withSig = (sig, f) => py.named(f, sig);
  let storages = 0;
  const tensor = (nbytes) => {
    const storage = { _cdata: storages++ };
    return { numel: () => nbytes, untyped_storage: () => storage };
  };
  class LayerBytes {
    constructor(tensors, runs, casts, nbytes) { Object.assign(this, { tensors, runs, casts, nbytes, expansions: [] }); }
    get read_bytes() { return py.sum(this.runs.map((run) => run.nbytes)); }
    called(number) { return `layer ${number}`; }
  }
  LayerBytes.isClass = true;
  class ByteRun { constructor(file, offset, nbytes) { this.nbytes = nbytes; } }
  ByteRun.isClass = true;
  class Exchange {
    constructor(count = 0, nbytes = 0) { Object.assign(this, { count, nbytes }); }
  }
  Exchange.isClass = true;
  Exchange.sig = Exchange.fields = ["count", "nbytes"];
  class LayerReader { constructor() { this.bytes_read = 0; this.first_reads = null; } close() {} }
  class Ticket { failed() { return null; } }
  class MemoryStats { constructor() { this.shared = false; } }
  MemoryStats.isClass = true;
  class Alone {
    constructor() { Object.assign(this, { rank: 0, local_rank: 0, size: 1, local_size: 1 }); }
    exchange(value) { return [value]; }
  }
  Alone.isClass = true;
  const nothing = { enter: () => null, exit: () => null };
  class StreamMeter {
    constructor() {
      const idle = () => null;
      this.trace = { span: withSig(["kind", "name", "nbytes"], () => nothing) };
      this.counters = {
        bytes_uploaded: 0, count_lease: idle, count_read: idle, count_layer_without_read: idle,
        count_upload(nbytes) { this.bytes_uploaded += nbytes; },
      };
      Object.assign(this, { buffers_are_full: idle, buffer_is_free: idle, forget_reads: idle });
    }
    waiting_for_disk() { return nothing; }
    waiting_for_upload() { return nothing; }
  }
  StreamMeter.isClass = true;
  class OpenLeases {
    constructor() { this.by_layer = new Map(); }
    prepare() {}
    clear() {}
    hold(number, slot) {
      return {
        enter: () => { this.by_layer.set(number, { slot }); return { slot }; },
        exit: () => this.by_layer.delete(number),
      };
    }
  }
  OpenLeases.isClass = true;
  OpenLeases.sig = ["layers", "num_visited", "backend", "meter", "aligned"];
  class Counter extends Map { get counts() { return true; } }
  Counter.isClass = true;
  const BaseException = { [Symbol.hasInstance]: () => true };
  return {
    Exception, BaseException, MemoryLimitError: kind(), ConfigError: kind(), ReadError: kind(), NonFiniteError: kind(), ValueError: kind(),
    LayerBytes, ByteRun, Exchange, LayerReader, Ticket, MemoryStats, Alone, StreamMeter, OpenLeases, Counter,
    Path: withSig([], () => ""),
    upload_to: withSig([], (slots, source, layout) => slots.upload(source, layout)),
    in_host_memory: () => false,
    stream_layout: withSig(["layers", "backend", "sharded"], (layers) => ({
      lazy: false, packed: true, stored: layers, in_slots: layers,
      layouts: layers.map((layer) => ({ copied: layer.nbytes, nbytes: layer.nbytes })),
    })),
    torch: { uint8: 1, device: (name) => name, empty: withSig(["nbytes", "dtype", "device"], tensor) },
    weakref: { finalize: () => null },
    time: {},
    math: { ceil: Math.ceil, floor: Math.floor, inf: Infinity, isinf: (x) => x === Infinity || x === -Infinity, isfinite: Number.isFinite },
    deque: (xs) => (xs === undefined ? [] : [...py.iter(xs)]),
    partial: (f, ...args) => withSig(f.sig.slice(args.length), (...more) => f(...args, ...more)),
    accumulate: withSig(["numbers", "initial"], (numbers, initial) => {
      const sums = [initial];
      for (const number of numbers) sums.push(sums[sums.length - 1] + number);
      return sums;
    }),
    bisect_left: withSig(["items", "value", "key"], (items, value, key) => {
      const at = items.findIndex((x) => !py.lt(key(x), value));
      return at < 0 ? items.length : at;
    }),
    astuple: (x) => x.constructor.fields.map((name) => x[name]),
    fields: (x) => x.constructor.fields.map((name) => ({ name })),
    is_dataclass: (x) => Boolean(x && x.constructor && x.constructor.fields),
    parse_memory: (value, total) => (value === "auto" ? Math.trunc(0.9 * total) : value),
    MemoryStrategy: { RESIDENT: "resident", STREAMING: "streaming" },
    buffer_bytes: (model) => model.buffers,
    moments_elsewhere: () => 0,
    human_bytes: null, human_count: null,
    dealt: (lengths) => [lengths],
    padding_of: () => ({ longest: (config) => config.max_length }),
    expert_summary: () => null,
    with_waiting: (blueprint, batch, work) => work,
    has_addresses: () => true,
    _agree: () => null, _notes: () => [], main_dtype: (model) => model,
    num_positions: (config) => config.positions, with_adapter: null,
    CHUNK_TOKENS: 1024, PAGE: 4096,
  };
})();
