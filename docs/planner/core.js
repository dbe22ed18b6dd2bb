"use strict";
// From what a person chose to a plan: the tables of models.js, as the arithmetic of plan.js takes them.

const lemaPlanner = (() => {
  const { Planner } = lema_plan_needs;
  const { MicroBatch, LayerWork, HeadWork, Workload } = lema_plan_work_workload;
  const { PROFILES, MachineState } = lema_plan_machine;
  const { by_arithmetic, step_shape } = lema_plan_work_step;
  const { best } = lema_plan_choice;
  const { plan_with, _of_rows } = lema_plan_plan;
  const { Speeds } = lema_plan_cost;
  const { human_bytes } = lema_config_units;
  const GB = 1e9;

  class Config {
    constructor(settings) { Object.assign(this, settings); }
    model_copy(update) { return new Config({ ...this, ...Object.fromEntries(update) }); }
  }
  Config.prototype.model_copy.sig = ["update"];

  const between = (figures, rank) => {
    // Every figure is on a line between the two ranks that were measured.
    const [low, high] = figures;
    if (Array.isArray(low)) return low.map((_, at) => between([low[at], high[at]], rank));
    const [from, to] = lemaFacts.ranks;
    return Math.round(low + ((high - low) * (rank - from)) / (to - from));
  };

  const headOf = (model, length, rows, chunk) => {
    const figures = (of) => model.heads[of][rows - 1][lemaFacts.chunks.indexOf(chunk)];
    if (model.heads[length]) return figures(length);
    const [short, long] = lemaFacts.lengthsOfHead.slice(-2);
    const [from, to] = [figures(short), figures(long)];
    return from.map((low, at) => low + ((to[at] - low) * (length - short)) / (long - short));
  };

  const workOf = (model, length, rank, rows, chunk) => {
    const [layers, [hidden, call, prelude, state, below]] = between(
      model.work[length].map((ofRank) => ofRank[rows - 1]), rank);
    const none = () => new stubs.Exchange();
    const works = layers.map((figures) => {
      const [forward, recompute, backward, saved, working, after, gradient, products, flops] = figures;
      const exchanges = [none(), none(), none()];
      return new LayerWork(forward, recompute, backward, saved, working, after, gradient, exchanges, none(), products, flops);
    });
    const [flops, working, inPieces, waiting] = headOf(model, length, rows, chunk);
    const pieces = inPieces === undefined ? null : new HeadWork(0, inPieces, none(), waiting);
    return new Workload(model.kinds, works, new HeadWork(flops, working, none()), hidden, call, prelude, state, Boolean(below), none(), pieces);
  };

  Planner.prototype.work = function (batch, chunk = null) {
    const tokens = chunk || this.config.loss_chunk_tokens;
    const { model, rank } = this.blueprint;
    const [one, two] = [1, 2].map((rows) => workOf(model.facts, batch.length, rank, rows, tokens));
    const work = _of_rows(one, two, batch.rows, Math.max(1, Math.floor(tokens / batch.length)));
    // Those of memory alone are of the rows of a chunk: operations are of all rows.
    const flops = one.head.flops + (batch.rows - 1) * (two.head.flops - one.head.flops);
    return py.replace(work, { head: py.replace(work.head, { flops }) });
  };
  Planner.prototype._elsewhere = () => 0;

  const layerOf = ([nbytes, read_bytes, upload_bytes, expanded_bytes = 0, expands = 0]) =>
    ({ nbytes, read_bytes, upload_bytes, expanded_bytes, expansions: expands ? [1] : [], casts: [], runs: [] });

  const blueprintOf = (facts, form, objective, rank) => {
    const stored = facts.forms[form];
    const layers = stored.order.map((kind) => layerOf(stored.layers[kind]));
    const cuts = objective === "sft" && stored.head !== null;
    return {
      model: { facts, config: { positions: facts.positions }, buffers: stored.buffers, itemsize: facts.itemsize },
      rank, layers, leased: layers,
      outside_bytes: stored.outside[objective === "sft" ? 0 : 1],
      tables: { row_bytes: stored.rows[objective === "sft" ? 0 : 2], notes: [] },
      head: { module: cuts ? {} : null, nbytes: cuts ? stored.head : 0, asked: false, pieces: () => stored.pieces.map(layerOf), notes: [] },
      adapter_bytes: between(facts.adapter, rank),
      adapter_parameters: between(facts.trained, rank),
      checkpoint_bytes: between(facts.checkpoint, rank),
      stored_bytes: stored.stored, parameters: facts.parameters,
      reference_bytes: 0, trained: null, cut_experts: null, parts: null, experts: 0, runs_again: false,
      head_in_pieces: null, pieces: [], parallel: { size: 1 }, group_bytes: new Map(),
      expanded_bytes: Math.max(...layers.map((layer) => layer.expanded_bytes)),
      lowest_adapted: facts.lowest, notes: [],
    };
  };

  const machineOf = (inputs) => {
    const machine = py.item(PROFILES, inputs.card);
    return py.replace(machine, {
      device_memory: Math.max(machine.device_memory, inputs.deviceMemory),
      host_memory: Math.max(machine.host_memory, inputs.hostMemory),
      speeds: new Speeds(inputs.diskSpeed, machine.speeds.link),
    });
  };

  // A pasted config has tables of its own.
  const factsOf = (inputs) => (inputs.config ? lemaPasted.facts(inputs.config) : lemaModels[inputs.model]);

  const plannerOf = (inputs, chunk) => {
    const facts = factsOf(inputs);
    const config = new Config({
      ...lemaFacts.defaults,
      objective: inputs.objective, max_length: inputs.length, batch_size: inputs.rows,
      device_memory: inputs.deviceMemory, host_memory: inputs.hostMemory,
      loss_chunk_tokens: chunk, experts_per_slot: null, num_train_epochs: inputs.epochs,
      train_data: inputs.dataRows ? ["data.jsonl"] : null,
    });
    const blueprint = blueprintOf(facts, inputs.form, inputs.objective, inputs.rank);
    const machine = machineOf(inputs);
    const state = new MachineState(machine, machine.host_memory, "profile", 0);
    const shape = step_shape(config, facts.positions);
    let planner = new Planner(config, blueprint, state, null, null, shape);
    planner = best(py.replace(planner, { workload: planner.work(shape.micro_batch) }));
    const timings = by_arithmetic(planner.workload, blueprint.layers, machine, facts.itemsize);
    planner = best(py.replace(planner, { timings }));
    if (inputs.objective !== "sft" || planner.blueprint.pieces.length) return planner;
    // A head that is whole after all keeps a table of the same weight whole.
    const tables = { row_bytes: facts.forms[inputs.form].rows[1], notes: [] };
    return py.replace(planner, { blueprint: py.replace(planner.blueprint, { tables }) });
  };

  const settingsOf = (inputs, chunk) => {
    const facts = factsOf(inputs);
    const settings = { model_name_or_path: facts.hub, train_data: "data.jsonl", output_dir: "output" };
    if (inputs.objective !== "sft") settings.objective = inputs.objective;
    Object.assign(settings, { max_length: inputs.length, batch_size: inputs.rows, num_train_epochs: inputs.epochs });
    if (inputs.form !== "published") settings.quantize_base = inputs.form;
    settings.device_memory = `${inputs.deviceMemory / GB}GB`;
    settings.host_memory = `${inputs.hostMemory / GB}GB`;
    settings.loss_chunk_tokens = chunk;
    settings.lora_rank = inputs.rank;
    settings.lora_alpha = 2 * inputs.rank;
    if (facts.experts) Object.assign(settings, { lora_target_parameters: [], experts_per_slot: null });
    return settings;
  };

  const yamlOf = (settings) => {
    const written = (value) => (typeof value === "string" && /^[A-Za-z][\w./-]*$|^[\d.]+GB$/.test(value) ? value : JSON.stringify(value));
    const lines = Object.entries(settings).map(([name, value]) => `${name}: ${written(value)}`);
    if (settings.quantize_base) lines.unshift("# The base is quantised once, at the first start, beside the published one.");
    lines.unshift("# Made by the planner of LEMA. `lema plan` predicts it on your own machine.");
    return `${lines.join("\n")}\n`;
  };

  const plan = (inputs) => {
    // The plan of what a person chose: logits of 1,024 tokens at once, or fewer where memory is short.
    let refused = null;
    for (const chunk of lemaFacts.chunks) {
      try {
        const planner = plannerOf(inputs, chunk);
        const rows = inputs.dataRows;
        const counts = { rows, tokens: Math.round(rows * inputs.dataLength) };
        const data = rows ? { counts } : null;
        const made = plan_with(planner, null, false, data);
        if (!made.fits) throw new stubs.MemoryLimitError(made.verdict, "device_memory");
        return { plan: made, planner, chunk, settings: settingsOf(inputs, chunk) };
      } catch (error) {
        if (!(error instanceof stubs.MemoryLimitError)) throw error;
        refused = error;
      }
    }
    return { refused };
  };

  const figures = (inputs) => {
    // Every figure that the page shows, as plain numbers.
    if (inputs.objective === "kto" && inputs.rows < 2) {
      return { fits: false, why: "kto estimates its KL term from other rows of the step", how: "Set 2 rows or more." };
    }
    const made = plan(inputs);
    if (made.refused) return { fits: false, why: made.refused.message, how: made.refused.how };
    const { plan: found, settings } = made;
    const epoch = found.epoch;
    const spilled = found.memory.disk.get("boundaries") + found.memory.disk.get("saved");
    const runHours = epoch ? epoch.run_hours : null;
    return {
      fits: true, yaml: yamlOf(settings),
      tokens: found.tokens, rowsAtOnce: found.micro_batch.rows,
      device: Object.fromEntries(found.memory.device), host: Object.fromEntries(found.memory.host),
      disk: Object.fromEntries(found.memory.disk),
      devicePeak: found.step.device_peak, hostPeak: found.host_peak,
      secondsOfStep: found.step.seconds, tokensPerSecond: found.tokens_per_second,
      bottleneck: found.step.bottleneck, compute: found.step.compute, link: found.step.link, diskSeconds: found.step.disk,
      crossover: found.crossover, bytesRead: found.step.bytes_read,
      steps: epoch ? epoch.run_steps : null, hours: runHours,
      cost: inputs.price && epoch ? inputs.price * runHours : null,
      written: epoch ? epoch.run_steps * spilled + found.memory.disk.get("checkpoint") : null, spilled,
      residents: found.allocation.residents.size, cached: found.allocation.host_cached.size, layers: found.needs.demand.layers.length - found.needs.demand.pieces,
      pieces: found.needs.demand.pieces, recompute: found.allocation.recompute, boundaries: found.allocation.boundaries,
      verdict: found.verdict,
    };
  };
  return { figures, workOf, PROFILES, GB, human_bytes };
})();
