"use strict";
// The tables of a model that is only known by its config.json: the formulas of families.js at its sizes.

const lemaPasted = (() => {
  const { spans_of } = lema_engine_head_spans;
  const PAGE = 4096;
  const LINEAR = /_proj\.weight$/;
  const TWO_BYTES = ["bfloat16", "float16"];
  const SIZES = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"];
  const EXPERTS = ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];
  const at = (name) => lemaSymbols.indexOf(name);

  // A formula is the largest of sums; a term is a factor and the places of the sizes that it is multiplied by.
  const sum = (terms, sizes) => terms.reduce((total, [factor, places]) =>
    total + places.reduce((product, place) => product * sizes[place], factor), 0);
  const value = (formula, sizes) => Math.max(0, ...formula.map((terms) => sum(terms, sizes)));

  // A key that a config does not have has the value that `transformers` gives it.
  const valueOf = (config, name) => (config[name] === undefined ? lemaAbsent[config.model_type][name] : config[name]);

  // The number type of the weights, in the config's own words; undefined: it has none.
  const dtypeOf = (config) => {
    const { text_config: text = {} } = config;
    const named = [config.dtype, config.torch_dtype, text.dtype, text.torch_dtype].find((name) => name !== undefined && name !== null);
    return named === undefined ? undefined : String(named).replace(/^torch\./, "");
  };
  const ofOtherBytes = (config) => {
    const dtype = dtypeOf(config);
    if (dtype === undefined || TWO_BYTES.includes(dtype)) return "";
    return `its weights are ${dtype}, and the page plans for weights of two bytes a number (${TWO_BYTES.join(", ")})`;
  };
  const added = (config) => ["attention_bias", "mlp_bias", "use_sliding_window"].filter((name) => config[name]);

  const headsOf = (config) => {
    const heads = config.num_attention_heads;
    const groups = valueOf(config, "num_key_value_heads") || heads;
    const width = valueOf(config, "head_dim") || config.hidden_size / heads;
    return { heads, groups, width };
  };

  // Why there are no formulas for a config; empty: there are.
  const whyNot = (config) => {
    const type = config.model_type;
    if (!Object.hasOwn(lemaFamilies, type)) return `the page has formulas for ${Object.keys(lemaFamilies).join(", ")}, and none for ${type}`;
    const missing = SIZES.filter((name) => config[name] === undefined);
    if (missing.length) return `it has no ${missing.join(", ")}`;
    const whole = (name) => Number.isSafeInteger(config[name]) && config[name] > 0;
    const optional = ["num_key_value_heads", "head_dim", "max_position_embeddings"].filter((name) => (config[name] ?? null) !== null);
    const wrong = [...SIZES, ...optional].filter((name) => !whole(name));
    if (wrong.length) return `a whole number above 0 is needed for ${wrong.join(", ")}`;
    if (config.quantization_config) return "it is published quantised, and the formulas are of weights that are not";
    const bytes = ofOtherBytes(config);
    if (bytes) return bytes;
    const set = added(config);
    if (set.length) return `it sets ${set.join(", ")}, which the formulas do not have`;
    const { heads, groups, width } = headsOf(config);
    if (!Number.isInteger(width)) return `its ${heads} heads (num_attention_heads) do not divide its hidden_size of ${config.hidden_size}, and it has no head_dim`;
    if (heads % groups) return `its ${groups} heads of keys (num_key_value_heads) do not divide its ${heads} heads (num_attention_heads)`;
    return "";
  };

  // The published model whose tables hold for a config; undefined: there is none.
  const published = (config) => {
    const text = config.text_config || config;
    const method = (config.quantization_config || text.quantization_config || {}).quant_method ?? null;
    const experts = EXPERTS.map((name) => text[name]).find(Number.isInteger);
    const ties = [text, config].map((part) => part.tie_word_embeddings).filter((tied) => tied !== undefined);
    if (ofOtherBytes(config)) return undefined;
    const type = config.model_type;
    const formulas = Object.hasOwn(lemaFamilies, type);
    if (formulas && added(config).length) return undefined;
    const heads = formulas ? headsOf(config) : {};
    const sizes = { ...text, experts, num_key_value_heads: heads.groups ?? text.num_key_value_heads, head_dim: heads.width ?? text.head_dim };
    // A size that is not said may be any, but of types with formulas all are known.
    const unsaid = (name) => !formulas && name !== "hidden_size" && name !== "num_hidden_layers";
    const same = ([, model]) =>
      model.sizes && model.method === method &&
      (model.type === type || (!formulas && `${model.type}_text` === type)) &&
      (!ties.length || ties.includes(model.tied)) &&
      Object.entries(model.sizes).every(([name, size]) => sizes[name] === size || ((sizes[name] ?? null) === null && unsaid(name)));
    return (Object.entries(lemaModels).find(same) || [])[0];
  };

  const sizesOf = (config) =>
    ({ text: config, hidden: config.hidden_size, words: config.vocab_size, layers: config.num_hidden_layers, ...headsOf(config) });

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

  // The lengths of rows that a person may choose: those of all models, and the model's own where it lies between or below.
  const lengthsOf = (positions) => {
    const lengths = lemaFacts.lengths.filter((length) => positions === null || length <= positions);
    const between = positions !== null && positions < lemaFacts.lengths.at(-1) && !lengths.includes(positions);
    return between ? [...lengths, positions] : lengths;
  };

  // The tables of a config, as models.js has them.
  const facts = (config) => {
    const why = whyNot(config);
    if (why) throw new Error(why);
    const size = sizesOf(config);
    const { text, hidden, words, layers, heads, groups, width } = size;
    const type = config.model_type;
    const family = lemaFamilies[type][heads === groups ? "each" : "shared"];
    const tied = valueOf(config, "tie_word_embeddings");
    let piece = 0;
    const sizes = (length, rank = 0) => [hidden, text.intermediate_size, heads / groups, groups, width, rank, length, words, piece];
    const weights = family.weights.map(([name, shape]) => [name, shape.map((formula) => value(formula, sizes(1)))]);
    const forms = Object.fromEntries(Object.keys(lemaStored).map((form) => [form, formOf(form, weights, size, tied)]));
    piece = forms.published.pieces[0][1] / (2 * hidden);
    const positions = valueOf(config, "max_position_embeddings");
    const lengths = lengthsOf(positions);
    const inLayer = weights.reduce((total, [, shape]) => total + shape.reduce((product, at) => product * at, 1), 0);
    const adapted = layers * weights.filter(([name, shape]) => shape.length === 2 && LINEAR.test(name)).reduce((total, [, [rows, columns]]) => total + rows + columns, 0);
    const trained = lemaFacts.ranks.map((rank) => rank * adapted);
    return {
      hub: "your-model", type, method: null, published: dtypeOf(config) === "float16" ? "fp16" : "bf16", experts: false, positions, itemsize: 2,
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
  return { dtypeOf, facts, published, whyNot };
})();
