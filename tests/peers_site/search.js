// Asks a built site's own search for pages: the worker that a browser runs, on the site's index.
// Reads a JSON list of questions from standard input, and writes for each the list of pages found,
// the best first. Usage: node search.js SITE < questions.json
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const vm = require("node:vm");

const site = process.argv[2];
const questions = JSON.parse(fs.readFileSync(0, "utf-8"));
const workers = path.join(site, "assets", "javascripts", "workers");
const [name] = fs.readdirSync(workers).filter((file) => /^search\..*\.js$/.test(file));
const index = JSON.parse(
  fs.readFileSync(path.join(site, "search", "search_index.json"), "utf-8"),
);

const SETUP = 0;
const QUERY = 2;
const answers = [];
const worker = {
  addEventListener: (_, listener) => (worker.listener = listener),
  postMessage: (message) => answers.push(message),
  importScripts: () => undefined,
  location: { href: "http://localhost/" },
  console,
};
worker.self = worker;
vm.runInNewContext(fs.readFileSync(path.join(workers, name), "utf-8"), worker);

async function ask(type, data) {
  await worker.listener({ data: { type, data } });
  return answers.at(-1).data;
}

async function main() {
  await ask(SETUP, { ...index, options: { suggest: false } });
  const pages = [];
  for (const question of questions) {
    const { items } = await ask(QUERY, question);
    pages.push(items.map((sections) => sections[0].location.split("#")[0]));
  }
  process.stdout.write(JSON.stringify(pages));
}

main();
