"use strict";
// The tables of a model that is only known by its config.json: the formulas of families.js at its sizes.

const lemaPasted = (() => {
  const { spans_of } = lema_engine_head_spans;
  const PAGE = 4096;
  const LINEAR = /_proj\.weight$/;
  const BY_DEFAULT_TIED = ["gemma2", "gemma3_text", "smollm3"];
  const at = (name) => lemaSymbols.indexOf(name);

  // A formula is the largest of sums; a term is a factor and the places of the sizes that it is multiplied by.
  const sum = (terms, sizes) => terms.reduce((total, [factor, places]) =>
    total + places.reduce((product, place) => product * sizes[place], factor), 0);
  const value = (formula, sizes) => Math.max(0, ...formula.map((terms) => sum(terms, sizes)));

  // Why there are no formulas for a config; empty: there are.
  const whyNot = (config) => {
    const text = config;
    const type = config.model_type;
    if (!lemaFamilies[type]) return `the page has formulas for ${Object.keys(lemaFamilies).join(", ")}, and none for ${type}`;
    const missing = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"].filter((name) => !Number.isInteger(text[name]));
    if (missing.length) return `it has no ${missing.join(", ")}`;
    if (config.quantization_config) return "it is published quantised, and the formulas are of bf16";
    const set = ["attention_bias", "mlp_bias", "use_sliding_window"].filter((name) => text[name]);
    if (set.length) return `it sets ${set.join(", ")}, which the formulas do not have`;
    return "";
  };

  const sizesOf = (config) => {
    const text = config;
    const heads = text.num_attention_heads;
    const groups = text.num_key_value_heads || heads;
    const width = text.head_dim || text.hidden_size / heads;
    return { text, hidden: text.hidden_size, words: text.vocab_size, layers: text.num_hidden_layers, heads, groups, width };
  };

  const headOf = (rows, length, chunk, formulas, sizes) => {
    // Flops are of all tokens, logits of those of a chunk; in pieces every token waits for its gradient.
    const tokens = rows * length;
    const block = Math.min(rows, Math.max(1, Math.floor(chunk / length))) * Math.min(length, chunk);
    const [flops, working, pieces, waiting] = formulas[0].head;
    const wait = value(waiting, sizes(1));
    const ofPiece = (terms) => terms.some(([, places]) => places.includes(at("piece")));
    const products = pieces.filter(ofPiece);
    // At the end the gradients of all tokens are there, and the part before the product runs for each chunk.
    const atEnd = formulas[rows - 1].head[2].filter((terms) => !ofPiece(terms)).map((terms) => {
      const hidden = terms.filter(([, places]) => places.includes(at("hidden")) && places.includes(at("length")));
      const others = terms.filter((term) => !hidden.includes(term));
      const kept = hidden.reduce((total, [factor]) => total + factor, 0) / rows;
      return sum(others, sizes(length)) + sizes(1)[at("hidden")] * (Math.min(kept, 10) * tokens + Math.max(kept - 10, 0) * block);
    });
    return [
      value(flops, sizes(tokens)), value(working, sizes(block)),
      Math.max(value(products, sizes(block)) + (tokens - block) * wait, ...atEnd), tokens * wait,
    ];
  };

  const formOf = (form, weights, { hidden, words, layers, width }, tied) => {
    const [element, row, weight] = lemaStored[form];
    const quantised = form !== "published";
    let read = 0;
    let expanded = 0;
    for (const [name, shape] of weights) {
      const whole = shape.length < 2 || !LINEAR.test(name);
      const numbers = shape.reduce((product, size) => product * size, 1);
      read += quantised && !whole ? element * numbers + row * shape[0] + weight : 2 * numbers;
      if (quantised && !whole) expanded += 2 * numbers;
    }
    read = Math.round(read);
    const layer = [read + PAGE, read, read, expanded, Number(quantised)];
    const head = 2 * words * hidden;
    const pieces = spans_of(words, 2 * hidden, layer[0]).map(([first, end]) => {
      const nbytes = 2 * hidden * (end - first);
      return [nbytes + PAGE, nbytes, nbytes];
    });
    return {
      layers: [layer], order: Array(layers).fill(0),
      outside: [2 * hidden + PAGE, 2 * hidden + PAGE + head], head, pieces,
      rows: tied ? [2 * hidden, 0, 0] : [2 * hidden, 2 * hidden, 2 * hidden],
      buffers: 4 * width, stored: layers * read + 2 * hidden + (tied && !quantised ? 1 : 2) * head, // a quantised file has both names of a tied weight
    };
  };

  // The tables of a config, as models.js has them.
  const facts = (config) => {
    const why = whyNot(config);
    if (why) throw new Error(why);
    const size = sizesOf(config);
    const { text, hidden, words, layers, heads, groups, width } = size;
    const type = config.model_type;
    const family = lemaFamilies[type][heads === groups ? "each" : "shared"];
    const tied = text.tie_word_embeddings ?? config.tie_word_embeddings ?? BY_DEFAULT_TIED.includes(type);
    let piece = 0;
    const sizes = (length, rank = 0) => [hidden, text.intermediate_size, heads / groups, groups, width, rank, length, words, piece];
    const weights = family.weights.map(([name, shape]) => [name, shape.map((formula) => value(formula, sizes(1)))]);
    const forms = Object.fromEntries(Object.keys(lemaStored).map((form) => [form, formOf(form, weights, size, tied)]));
    piece = forms.published.pieces[0][1] / (2 * hidden);
    const positions = text.max_position_embeddings ?? null;
    const lengths = lemaFacts.lengths.filter((length) => positions === null || length <= positions);
    const inLayer = weights.reduce((total, [, shape]) => total + shape.reduce((product, at) => product * at, 1), 0);
    const adapted = layers * weights.filter(([name, shape]) => shape.length === 2 && LINEAR.test(name)).reduce((total, [, [rows, columns]]) => total + rows + columns, 0);
    const trained = lemaFacts.ranks.map((rank) => rank * adapted);
    return {
      hub: "your-model", type, quantised: false, published: "bf16", experts: false, positions, itemsize: 2,
      parameters: layers * inLayer + hidden + (tied ? 1 : 2) * words * hidden,
      // an adapter's weights, gradients and two moments in fp32; a checkpoint has no gradients
      trained, adapter: trained.map((count) => 16 * count), checkpoint: trained.map((count) => 12 * count),
      lowest: 0, kinds: Array(layers).fill(0), forms,
      work: Object.fromEntries(lengths.map((length) => [length, lemaFacts.ranks.map((rank) => family.rows.map((formulas) => [
        [formulas.layer.map((formula) => value(formula, sizes(length, rank)))],
        [...formulas.beside.map((formula) => value(formula, sizes(length, rank))), 0],
      ]))])),
      heads: Object.fromEntries(lengths.map((length) => [length, family.rows.map((_, index) =>
        lemaFacts.chunks.map((chunk) => headOf(index + 1, length, chunk, family.rows, sizes)))])),
    };
  };
  return { facts, whyNot };
})();
