// Answers each line of standard input, a query, with the search of the built site in the folder argv[2]: the addresses
// of its results, as JSON.
const fs = require("fs"), path = require("path"), readline = require("readline");
const site = process.argv[2];
const workers = path.join(site, "assets/javascripts/workers");
const file = fs.readdirSync(workers).find((name) => name.startsWith("search") && name.endsWith(".js"));
let answered;
globalThis.self = { postMessage: (message) => answered(message) };
(0, eval)(fs.readFileSync(path.join(workers, file), "utf8"));
const ask = (message) => new Promise((resolve) => { answered = resolve; self.onmessage({ data: message }); });
(async () => {
  const index = JSON.parse(fs.readFileSync(path.join(site, "search.json"), "utf8"));
  await ask({ type: 0, data: index });
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const answer = await ask({ type: 2, data: { input: line } });
    console.log(JSON.stringify(answer.data.items.map((item) => index.items[item.id].location)));
  }
})();
