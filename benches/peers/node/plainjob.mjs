// plainjob on better-sqlite3.

import Database from "better-sqlite3";
import { better, defineQueue } from "plainjob";

const TYPE = "t";
const SYNCHRONOUS = ["OFF", "NORMAL", "FULL", "EXTRA"];
const BATCH = 1000;

export const PEER = "plainjob (Node)";

// Workloads, by the beginnings of their names, and why they are left out.
export const LACKS = [
  ["W5 claim", "a claim takes one message"],
  ["W6 behind gated", "no gates"],
  ["W7", "its worker polls"],
];

export const settingOf = (cls) => (cls === "NORMAL" ? "default" : "set");

const silent = { error() {}, warn() {}, info() {}, debug() {} };

export class Plainjob {
  constructor(folder, cls) {
    this.db = new Database(`${folder}/q.db`);
    this.queue = defineQueue({ connection: better(this.db), logger: silent });
    this.db.pragma(`synchronous=${cls}`);
  }

  close() {
    this.queue.close();
  }

  enqueue(text) {
    this.queue.add(TYPE, text);
  }

  // What its worker does for a job: takes its id, reads it, marks it as done. It stores JSON.
  claim() {
    const taken = this.queue.getAndMarkJobAsProcessing(TYPE);
    if (!taken) return undefined;
    return { id: taken.id, text: JSON.parse(this.queue.getJobById(taken.id).data) };
  }

  ack(job) {
    this.queue.markJobAsDone(job.id);
  }

  enqueueBatch(text, count) {
    this.queue.addMany(TYPE, Array(count).fill(text));
  }

  fill(text, count) {
    for (let left = count; left > 0; left -= BATCH) this.enqueueBatch(text, Math.min(left, BATCH));
  }

  fillBehind(state, text, count) {
    const change = {
      delayed: "next_run_at = next_run_at + 604800000",
      done: "status = 2",
      dead: "status = 3, failed_at = created_at, error = 'bench'",
    }[state];
    if (!change) throw new Error("unable");
    this.fill(text, count);
    this.db.exec(`UPDATE plainjob_jobs SET ${change}`);
  }

  settings() {
    const version = this.db.prepare("SELECT sqlite_version() AS version").get().version;
    const journal = this.db.pragma("journal_mode", { simple: true });
    return [`SQLite ${version}`, `${journal}/${SYNCHRONOUS[this.db.pragma("synchronous", { simple: true })]}`];
  }
}
