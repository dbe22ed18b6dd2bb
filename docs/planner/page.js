"use strict";
// The form, and what is shown of a plan.

(() => {
  const form = document.getElementById("chosen");
  const field = (name) => form.elements.namedItem(name);
  const show = (id, text) => { document.getElementById(id).textContent = text; };
  const { GB, human_bytes: bytes, figures: planned } = lemaPlanner;
  const FORMS = { published: "as published", nf4: "nf4 (QLoRA, 4-bit)", int8: "int8", fp8: "fp8" };
  const CARDS = { t4: "T4, 16 GB", "4090": "RTX 4090, 24 GB", h200: "H200, 141 GB" };
  const LIMITS = { compute: "computing", link: "the link", disk: "the disk" };
  const PARTS = Object.fromEntries(lemaFacts.parts);
  const PASTED = "your config.json";
  const count = (x) => Math.round(x).toLocaleString("en-US");

  const options = (name, entries) => {
    const before = field(name).value;
    field(name).replaceChildren(...entries.map(([value, text]) => new Option(text, value)));
    if (entries.some(([value]) => String(value) === before)) field(name).value = before;
  };
  const element = (tag, text, className) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  const forModel = () => {
    const model = lemaModels[field("model").value];
    options("form", Object.keys(model.forms).map((name) =>
      [name, name === "published" ? `${FORMS[name]}: ${model.published}` : FORMS[name]]));
    const before = field("length").value || "1024";
    const lengths = Object.keys(model.work);
    options("length", lengths.map((length) => [length, count(length)]));
    // A model that does not have rows of 1,024 tokens takes its longest.
    field("length").value = [before, "1024"].find((length) => model.work[length]) || lengths.at(-1);
  };
  const forCard = () => {
    const machine = lemaPlanner.PROFILES.get(field("card").value);
    field("deviceMemory").value = (Math.floor((0.9 * machine.device_memory) / 1e8) / 10).toFixed(1);
    field("hostMemory").value = (machine.host_memory / 2 / GB).toFixed(0);
    field("diskSpeed").value = machine.speeds.disk / GB;
  };

  // Sentences on the fields that have no number, or one that they do not take.
  const faults = () => [...form.elements].filter((input) => input.type === "number").flatMap((input) => {
    const { value, required, min, max, step } = input;
    const label = input.labels[0].textContent.trim();
    const fault = lemaForm.faultOf({ label, value, bad: input.validity.badInput, required, min, max, step });
    input.setAttribute("aria-invalid", String(fault !== ""));
    return fault ? [fault] : [];
  });

  const inputs = () => {
    const number = (name) => Number(field(name).value);
    return {
      model: field("model").value, form: field("form").value, card: field("card").value,
      objective: field("objective").value, rank: number("rank"), length: number("length"), rows: number("rows"),
      deviceMemory: Math.round(number("deviceMemory") * GB), hostMemory: Math.round(number("hostMemory") * GB),
      diskSpeed: number("diskSpeed") * GB, diskSize: number("diskSize") * GB,
      dataRows: number("dataRows"), dataLength: Math.min(number("dataLength"), number("length")),
      epochs: number("epochs"), price: field("price").value === "" ? null : number("price"),
    };
  };

  const memory = (title, parts, limit) => {
    const box = element("div");
    const sizes = Object.entries(parts).filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]);
    const sum = sizes.reduce((total, [, size]) => total + size, 0);
    box.append(element("h2", `${title}: ${bytes(sum)}${limit ? ` of ${bytes(limit)}` : ""}`));
    const bar = element("div", undefined, "bar");
    const table = element("table");
    sizes.forEach(([part, size], at) => {
      const color = `var(--c${Math.min(at, 5)})`;
      const piece = element("i");
      piece.style.background = color;
      piece.style.width = `${(100 * size) / Math.max(sum, limit || 0)}%`;
      bar.append(piece);
      const row = element("tr");
      const name = element("td");
      const swatch = element("i");
      swatch.style.background = color;
      name.append(swatch, PARTS[part] || part);
      row.append(name, element("td", bytes(size)));
      table.append(row);
    });
    box.append(bar, table);
    return box;
  };

  const draw = () => {
    const boxes = document.getElementById("figures");
    const parts = document.getElementById("memory");
    const verdict = document.getElementById("verdict");
    boxes.replaceChildren();
    parts.replaceChildren();
    show("yaml", "");
    verdict.className = "bad";
    const wrong = faults();
    if (wrong.length) {
      verdict.textContent = `Nothing is planned. ${wrong.join(" ")}`;
      return;
    }
    const chosen = inputs();
    verdict.textContent = "The page could not plan this, which is a fault of the page. `lema plan` plans it.";
    const result = planned(chosen);
    if (!result.fits) {
      verdict.textContent = `This does not run: ${result.why}${result.how ? `. ${result.how}` : ""}`;
      return;
    }
    verdict.className = "";
    show("yaml", result.yaml);
    const needs = result.disk.model + result.spilled + result.disk.checkpoint;
    const room = needs <= chosen.diskSize ? "" : ` The disk is too small: ${bytes(needs)} are needed.`;
    verdict.textContent = `It ${result.verdict}.${room}`;
    const beside = `${bytes(chosen.hostMemory)} host memory, ${count(result.tokens)} tokens a step`;
    const box = (name, value, ...more) => {
      const made = element("div", undefined, "figure");
      made.append(element("small", name), element("b", value), ...more.map((text) => element("small", text)));
      boxes.append(made);
    };
    const hours = result.hours;
    box("Speed, predicted", `${count(result.tokensPerSecond)} tokens/s`, beside, `limited by ${LIMITS[result.bottleneck]}`);
    box("Time, predicted", hours < 1 ? `${(60 * hours).toFixed(1)} min` : `${hours.toFixed(1)} h`, beside, `${count(result.steps)} steps of ${result.secondsOfStep.toFixed(1)} s, if full`);
    box("Price", result.cost === null ? "-" : result.cost.toFixed(2), `${result.cost === null ? "type a price per hour" : "predicted hours x your price"}; ${beside}`);
    const hidden = result.crossover;
    box("Streaming costs nothing", hidden ? `from ${count(hidden)} tokens a step` : "at any step",
      hidden ? `now ${count(result.tokens)}; with ${bytes(chosen.hostMemory)} host memory` : beside);
    box("SSD, written in the run", bytes(result.written), `of it one checkpoint of ${bytes(result.disk.checkpoint)}, each further one as much`, beside);
    box("SSD, read in each step", bytes(result.bytesRead), `${bytes(needs)} of disk space in all`, beside);
    parts.append(memory("Device memory", result.device, chosen.deviceMemory), memory("Host memory", result.host, chosen.hostMemory));
  };

  // Plan for a model, or leave the one that is chosen, and say why.
  const choose = (name, sentence) => {
    listModels();
    if (name) field("model").value = name;
    forModel();
    show("recognised", sentence);
    draw();
  };
  const recognise = () => {
    const text = document.getElementById("config").value;
    let pasted = null;
    try { pasted = JSON.parse(text); } catch { pasted = null; }
    delete lemaModels[PASTED];
    if (text.trim() === "") return choose("", "");
    if (pasted === null || typeof pasted !== "object" || Array.isArray(pasted)) return choose("", "This is no JSON object.");
    const dtype = lemaPasted.dtypeOf(pasted) === undefined ? " It names no dtype: weights of two bytes a number are planned for." : "";
    const same = lemaPasted.published(pasted);
    if (same) return choose(same, `It has the sizes of ${same}: that is planned for. Put your own model's name into the file.${dtype}`);
    const why = lemaPasted.whyNot(pasted);
    if (why) return choose("", `The page cannot plan for this config: ${why}. It guesses nothing; \`lema plan\` plans any model that streams. What is shown is of the model above.`);
    lemaModels[PASTED] = lemaPasted.facts(pasted);
    return choose(PASTED, `The page computes its tables from these sizes. Put your own model's name into the file.${dtype}`);
  };

  const listModels = () => options("model", Object.entries(lemaModels).map(([name, model]) => [name, `${name} (${(model.parameters / 1e9).toFixed(1)} billion parameters)`]));
  listModels();
  options("card", lemaFacts.cards.map((name) => [name, `${CARDS[name] || name} (profile ${name})`]));
  options("objective", Object.keys(lemaFacts.objectives).map((name) => [name, name]));
  show("dated", lemaFacts.dated);
  field("card").value = "4090";
  forCard();
  forModel();
  let waiting = 0;
  form.addEventListener("input", (event) => {
    clearTimeout(waiting);
    if (event.target.id === "config") return recognise();
    if (event.target.name === "model") forModel();
    if (event.target.name === "card") forCard();
    const pairs = lemaFacts.objectives[field("objective").value].examples === "pairs";
    show("unit", pairs ? "Pairs per step" : "Rows per step");
    show("unit2", pairs ? "Pairs of data" : "Rows of data");
    if (faults().length) return draw();
    show("verdict", "Planning ...");
    waiting = setTimeout(draw, 150);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("copy").addEventListener("click", async () => {
    const text = document.getElementById("yaml").textContent;
    try {
      await navigator.clipboard.writeText(text);
      show("copied", "copied");
    } catch {
      getSelection().selectAllChildren(document.getElementById("yaml"));
      show("copied", "selected: copy it with the keyboard");
    }
  });
  draw();
})();
