// The workloads of driver/src/work, for a queue in JavaScript: the same names, rows and knobs.
// What runs in parallel runs in worker threads: this file is also what they run.

import { execFileSync } from "node:child_process";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { Worker, isMainThread, parentPort, workerData } from "node:worker_threads";

import { LACKS, PEER, Plainjob, settingOf } from "./plainjob.mjs";

const knob = (name, fallback) => process.env[name] || fallback;
const OUT = path.resolve(knob("PEERS_OUT", "made/by-hand"));
const TEMPLATES = path.resolve(knob("PEERS_TEMPLATES", `${OUT}/templates`));
const WORK = knob("PEERS_WORK", "W1");
const CLASS = knob("PEERS_CLASS", "");
const ROUND = knob("PEERS_ROUND", "1");
const SECS = +knob("SECS", 1);
const READY = +knob("W2_READY", 20000);
const DEPTHS = knob("W6_READY", "1000,100000,1000000").split(",").map(Number);
const BEHIND = +knob("W6_BEHIND", 1000000);
const STATES = knob("W6_STATES", "1") === "1";
const MINUTE = +knob("W9_SECS", 60);
const RATE = +knob("W9_RATE", 200);
const LIVE = +knob("W9_LIVE", 5000);
const QUIET = +knob("QUIET", 2);

const SMALL = 256;
const STAMP = 20;
const WORTH_KEEPING = 50000;
const SIZES = [[256, "256 B", 20000], [16 << 10, "16 KiB", 5000], [1 << 20, "1 MiB", 150]];

const now = () => performance.now() / 1000;
const payload = (size) => "abcdefghijklmnopqrstuvwxyz".repeat(Math.ceil(size / 26)).slice(0, size);
const stamped = (size) => String(process.hrtime.bigint()).padStart(STAMP, "0") + payload(size).slice(STAMP);

const mixed = (index) => {
  const place = (index * 37) % 100;
  return place === 0 ? 64 << 10 : place < 10 ? 4 << 10 : SMALL;
};

const sleep = (secs) => secs > 0 && Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, secs * 1000);

async function main() {
  fs.mkdirSync(OUT, { recursive: true });
  for (const cls of ["FULL", "NORMAL"]) {
    if (CLASS && CLASS !== cls) continue;
    const small = payload(SMALL);
    if (WORK === "SHOW") show(cls);
    if (WORK === "W1") await attempt(cls, "W1 enqueue x1", (work) => enqueue(cls, work));
    if (WORK === "W2") await attempt(cls, "W2 claim+ack x1", (work) => claim(cls, work));
    if (WORK === "W3") {
      await attempt(cls, "W3 enqueue x4", (work) => together(cls, work, 4, 0));
      await attempt(cls, "W3 enqueue x16", (work) => together(cls, work, 16, 0));
    }
    if (WORK === "W4") await attempt(cls, "W4 4+4", (work) => together(cls, work, 4, 4));
    if (WORK === "W5") {
      for (const size of [100, 1000]) await attempt(cls, `W5 enqueue batch ${size}`, (work) => batch(cls, work, size));
    }
    if (WORK === "W6") {
      for (const ready of DEPTHS) {
        const layOut = (queue) => queue.fill(small, ready);
        await attempt(cls, `W6 at ${ready} ready`, (work) => depth(cls, work, "ready", ready, layOut, ready));
      }
      for (const state of STATES ? ["delayed", "gated", "done", "dead"] : []) {
        const layOut = (queue) => {
          queue.fillBehind(state, small, BEHIND);
          queue.fill(small, 1000);
        };
        await attempt(cls, `W6 behind ${state}`, (work) => depth(cls, work, state, 1000, layOut, BEHIND));
      }
    }
    if (WORK === "W8") {
      for (const [size, name, ready] of SIZES) {
        await attempt(cls, `W8 enqueue ${name}`, (work) => enqueue(cls, work, size));
        await attempt(cls, `W8 claim+ack ${name}`, (work) => claim(cls, work, size, Math.max(20, Math.floor((ready * READY) / 20000))));
      }
    }
    if (WORK === "W9") await attempt(cls, "W9 minute", () => minute(cls));
  }
  process.exit(0);
}

async function attempt(cls, work, run) {
  if (LACKS.some(([lack]) => work.startsWith(lack))) return;
  try {
    await run(work);
  } catch (error) {
    console.error(`${PEER} (${cls}): ${work}: ${error}`);
    append("failures.tsv", [cls, ROUND, PEER, settingOf(cls), work, String(error).slice(0, 100)]);
  }
}

function append(file, columns) {
  const line = columns.join("\t");
  console.log(line);
  fs.appendFileSync(`${OUT}/${file}`, `${line}\n`);
}

function row(cls, work, figure, fields, times = [], errors = {}) {
  const columns = Object.entries(fields).map(([name, value]) => `${name}=${value}`);
  if (times.length) {
    const sorted = Float64Array.from(times).sort();
    columns.push(`samples=${sorted.length}`);
    for (const [name, part] of [["p50", 0.5], ["p99", 0.99], ["p99.9", 0.999], ["max", 1]]) {
      columns.push(`${name}=${(sorted[Math.floor((sorted.length - 1) * part)] * 1e6).toFixed(1)}`);
    }
  }
  for (const [text, count] of Object.entries(errors)) columns.push(`error=${count} x ${text}`);
  append("rows.tsv", [cls, ROUND, PEER, settingOf(cls), work, figure.toFixed(2), ...columns]);
}

let made = 0;

// Runs with a folder of its own, which is gone afterwards.
async function inFolder(run) {
  const folder = `${OUT}/data/plainjob-${process.pid}-${made++}`;
  fs.rmSync(folder, { recursive: true, force: true });
  fs.mkdirSync(folder, { recursive: true });
  try {
    return await run(folder);
  } finally {
    fs.rmSync(folder, { recursive: true, force: true });
  }
}

// Deep backlogs are copied from a template.
function fillFolder(folder, cls, what, count, layOut) {
  const layOutIn = (place) => {
    const queue = new Plainjob(place, cls);
    layOut(queue);
    queue.close();
  };
  if (count < WORTH_KEEPING) return layOutIn(folder);
  const template = `${TEMPLATES}/plainjob-${what}-${count}`;
  if (!fs.existsSync(template)) {
    fs.rmSync(`${template}.part`, { recursive: true, force: true });
    fs.mkdirSync(`${template}.part`, { recursive: true });
    layOutIn(`${template}.part`);
    fs.renameSync(`${template}.part`, template);
  }
  for (const file of fs.readdirSync(template)) {
    if (!file.endsWith("-shm")) fs.copyFileSync(`${template}/${file}`, `${folder}/${file}`);
  }
  settleDisk();
}

function settleDisk() {
  execFileSync("sync", ["-f", OUT]);
}

// What sync.c has counted in this process.
function syncs() {
  try {
    return Number(fs.readFileSync(process.env.SYNC_FILE).readBigUInt64LE());
  } catch {
    return NaN;
  }
}

function busy() {
  const ticks = fs.readFileSync("/proc/stat", "utf8").split("\n")[0].trim().split(/\s+/).slice(1).map(Number);
  return (ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6] + ticks[7]) / 100;
}

function own() {
  const usage = process.cpuUsage();
  return (usage.user + usage.system) / 1e6;
}

// Waits until others are quiet; what it gives back tells the cost of so many messages.
function meter() {
  settleDisk();
  for (const waited = now(); now() - waited < QUIET; ) {
    const [before, mine, began] = [busy(), own(), now()];
    sleep(0.25);
    if ((busy() - before - (own() - mine)) / (now() - began) < 0.25) break;
  }
  const [began, before, mine, synced] = [now(), busy(), own(), syncs()];
  return (messages) => {
    const [wall, used, count] = [now() - began, own() - mine, Math.max(messages, 1)];
    const others = Math.max(0, ((busy() - before - used) / (os.cpus().length * wall)) * 100);
    return {
      cpu: ((used * 1e6) / count).toFixed(1),
      others: others.toFixed(0),
      syncs: ((syncs() - synced) / count).toFixed(3),
    };
  };
}

// The call answers how many messages it moved; none ends it.
function repeat(call, secs = SECS, most = 1e9, times = []) {
  const began = now();
  let [count, before] = [0, began];
  while (count < most && before - began < secs) {
    const moved = call();
    if (!moved) break;
    count += moved;
    const after = now();
    times.push(after - before);
    before = after;
  }
  return { count, secs: now() - began, times };
}

function claimAck(queue) {
  const job = queue.claim();
  if (!job) return 0;
  queue.ack(job);
  return 1;
}

function show(cls) {
  return inFolder((folder) => {
    const queue = new Plainjob(folder, cls);
    queue.enqueue(payload(SMALL));
    claimAck(queue);
    append("settings.tsv", [cls, PEER, settingOf(cls), ...queue.settings()]);
    for (const [work, why] of LACKS) append("lacks.tsv", [cls, PEER, settingOf(cls), work, why]);
    queue.close();
  });
}

function enqueue(cls, work, size = SMALL) {
  return inFolder((folder) => {
    const queue = new Plainjob(folder, cls);
    const text = payload(size);
    const cost = meter();
    const done = repeat(() => (queue.enqueue(text), 1));
    row(cls, work, done.count / done.secs, cost(done.count), done.times);
    queue.close();
  });
}

function claim(cls, work, size = SMALL, ready = READY) {
  return inFolder((folder) => {
    fillFolder(folder, cls, "ready", Math.min(ready, WORTH_KEEPING - 1), (queue) => queue.fill(payload(size), ready));
    const queue = new Plainjob(folder, cls);
    const cost = meter();
    const done = repeat(() => claimAck(queue));
    row(cls, work, done.count / done.secs, cost(done.count), done.times);
    queue.close();
  });
}

function batch(cls, work, size) {
  return inFolder((folder) => {
    const queue = new Plainjob(folder, cls);
    const text = payload(SMALL);
    const cost = meter();
    const done = repeat(() => (queue.enqueueBatch(text, size), size), SECS, 1e6);
    row(cls, work, done.count / done.secs, cost(done.count), done.times);
    queue.close();
  });
}

function depth(cls, work, what, ready, layOut, laidOut) {
  return inFolder((folder) => {
    fillFolder(folder, cls, what, laidOut, layOut);
    const queue = new Plainjob(folder, cls);
    // One that is not timed: a file that was just opened may have to recover first.
    claimAck(queue);
    queue.fill(payload(SMALL), 1);
    const cost = meter();
    const step = Math.min(5000, Math.max(50, Math.floor(ready / 10)));
    const times = [];
    let [count, secs, spent] = [0, 0, 0];
    while (secs < SECS) {
      const before = syncs();
      const done = repeat(() => claimAck(queue), SECS - secs, step, times);
      [count, secs, spent] = [count + done.count, secs + done.secs, spent + syncs() - before];
      if (secs < SECS) {
        if (!done.count) break;
        queue.fill(payload(SMALL), done.count);
      }
    }
    const fields = { others: cost(count).others, syncs: (spent / Math.max(count, 1)).toFixed(3) };
    row(cls, work, count / secs, fields, times);
    queue.close();
  });
}

// Starts a thread for each role, all at once; answers what they found.
async function threads(folder, cls, roles, during) {
  new Plainjob(folder, cls).close();
  const shared = new Int32Array(new SharedArrayBuffer(12)); // [go, how many are ready, over]
  const start = (role, index) =>
    new Promise((found, failed) => {
      const worker = new Worker(new URL(import.meta.url), { workerData: { folder, cls, role, index, shared } });
      worker.on("error", failed);
      worker.on("message", (message) => {
        if (message !== "ready") return found(message);
        if (Atomics.add(shared, 1, 1) + 1 === roles.length) {
          Atomics.store(shared, 0, 1);
          Atomics.notify(shared, 0);
          during?.(() => Atomics.store(shared, 2, 1));
        }
      });
    });
  return Promise.all(roles.map(start));
}

function together(cls, work, producers, consumers) {
  return inFolder(async (folder) => {
    const cost = meter();
    const roles = [...Array(producers).fill("enqueue"), ...Array(consumers).fill("claim")];
    const found = await threads(folder, cls, roles);
    const sum = (role) => found.filter((one) => one.role === role).reduce((all, one) => all + one.count, 0);
    const secs = Math.max(...found.map((one) => one.secs));
    const [produced, consumed] = [sum("enqueue"), sum("claim")];
    const fields = cost(produced + consumed);
    if (consumers) fields.produced = (produced / secs).toFixed(1);
    const times = found.filter((one) => one.role === "enqueue").flatMap((one) => one.times);
    row(cls, work, (consumers ? consumed : produced) / secs, fields, times, errorsOf(found));
  });
}

function errorsOf(found) {
  const errors = {};
  for (const one of found) {
    for (const [text, count] of Object.entries(one.errors)) errors[text] = (errors[text] || 0) + count;
  }
  return errors;
}

function minute(cls) {
  return inFolder(async (folder) => {
    const queue = new Plainjob(folder, cls);
    let live = 0;
    for (const size of [256, 4 << 10, 64 << 10]) {
      const count = Array.from({ length: LIVE }, (_, index) => mixed(index)).filter((other) => other === size).length;
      queue.fill(stamped(size), count);
      live += count * size;
    }
    queue.close();
    const cost = meter();
    let log = 0;
    const during = (end) => {
      const looks = setInterval(() => (log = Math.max(log, sizes(folder).log)), 100);
      setTimeout(() => (clearInterval(looks), end()), MINUTE * 1000);
    };
    const found = await threads(folder, cls, ["paced enqueue", "paced enqueue", "paced claim", "paced claim"], during);
    const of = (role) => found.filter((one) => one.role === role);
    const times = (role) => of(role).flatMap((one) => one.times);
    const fields = cost(times("paced claim").length);
    for (const one of found) live += one.role === "paced enqueue" ? one.bytes : -one.bytes;
    row(cls, "W9 enqueue", times("paced enqueue").length / MINUTE, fields, times("paced enqueue"), errorsOf(found));
    row(cls, "W9 claim", times("paced claim").length / MINUTE, fields, times("paced claim"));
    row(cls, "W9 log, MiB", log / (1 << 20), {});
    new Plainjob(folder, cls).close(); // Writes the log back.
    row(cls, "W9 file over live data", sizes(folder).data / Math.max(live, 1), { live });
  });
}

// The bytes of the log and of the data.
function sizes(folder) {
  let [log, data] = [0, 0];
  for (const file of fs.readdirSync(folder)) {
    const bytes = fs.statSync(`${folder}/${file}`).size;
    if (file.endsWith("-wal") || file.endsWith("-journal")) log += bytes;
    else if (!file.endsWith("-shm")) data += bytes;
  }
  return { log, data };
}

// What a worker thread does.
function beside() {
  const { folder, cls, role, index, shared } = workerData;
  const queue = new Plainjob(folder, cls);
  const small = payload(SMALL);
  parentPort.postMessage("ready");
  Atomics.wait(shared, 0, 0);
  const found = { role, count: 0, bytes: 0, times: [], errors: {} };
  const began = now();
  const caught = (run) => {
    try {
      run();
    } catch (error) {
      found.errors[error.message] = (found.errors[error.message] || 0) + 1;
    }
  };
  if (role.startsWith("paced")) {
    paced();
  } else {
    while (now() - began < SECS) caught(role === "enqueue" ? produce : consume);
  }
  found.secs = now() - began;
  parentPort.postMessage(found);
  queue.close();

  function produce() {
    const before = now();
    queue.enqueue(small);
    found.times.push(now() - before);
    found.count++;
  }

  function consume() {
    if (claimAck(queue)) found.count++;
    else sleep(0.0005);
  }

  function paced() {
    const step = 2 / RATE;
    let next = index % 2;
    for (let due = began + (step * (index % 2)) / 2; !Atomics.load(shared, 2); due += step) {
      const early = due - now();
      sleep(early);
      const begun = early > 0 ? now() : due;
      caught(() => {
        if (role === "paced enqueue") {
          const size = mixed(next);
          next += 2;
          queue.enqueue(stamped(size));
          found.times.push(now() - begun);
          found.bytes += size;
        } else {
          const job = queue.claim();
          if (!job) return;
          found.times.push(now() - begun);
          found.bytes += job.text.length;
          queue.ack(job);
        }
      });
    }
  }
}

if (isMainThread) await main();
else beside();
