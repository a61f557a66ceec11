"""litequeue, persist-queue and huey. `PEER` picks one."""

import os
import sqlite3
import time

from workloads import DEAD, DONE, FULL, NORMAL, Contender, Unable, run

SYNCHRONOUS = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}


def ask(conn):
    """What a connection says of its durability."""
    journal = conn.execute("PRAGMA journal_mode").fetchone()[0]
    return f"{journal}/{SYNCHRONOUS[conn.execute('PRAGMA synchronous').fetchone()[0]]}"


def version():
    return "SQLite " + sqlite3.sqlite_version


class LiteQueue(Contender):
    peer = "litequeue"
    lacks = [
        ("W5 claim", "a claim takes one message"),
        ("W6 behind delayed", "no delays"),
        ("W6 behind gated", "no gates"),
        ("W7", "nothing wakes a consumer"),
    ]

    def __init__(self, cls):
        self.cls, self.setting = cls, "default" if cls == NORMAL else "set"

    def open(self, folder):
        import litequeue

        queue = litequeue.LiteQueue(filename_or_conn=folder + "/q.db", timeout=30)
        queue.conn.execute(f"PRAGMA synchronous={self.cls}")
        return queue

    def close(self, queue):
        queue.conn.close()

    def enqueue(self, queue, text):
        queue.put(text)

    def claim(self, queue):
        return queue.pop()

    def text(self, message):
        return message.data

    def ack(self, queue, message):
        queue.done(message.message_id)

    def enqueue_batch(self, queue, text, count):
        with queue.transaction("IMMEDIATE"):
            for _ in range(count):
                queue.put(text)

    def fill_behind(self, queue, state, text, count):
        from litequeue import MessageStatus

        statuses = {DONE: MessageStatus.DONE, DEAD: MessageStatus.FAILED}
        if state not in statuses:
            raise Unable
        self.enqueue_batch(queue, text, count)
        queue.conn.execute(f"UPDATE {queue.table} SET status = {statuses[state].value}")

    def settings(self, queue):
        return version(), ask(queue.conn)


class PersistQueue(Contender):
    peer = "persist-queue"
    shared = True
    lacks = [
        ("W5", "no batches"),
        ("W6 behind delayed", "no delays"),
        ("W6 behind gated", "no gates"),
        ("W7 wake across", "its waits see one process only"),
    ]

    def __init__(self, cls):
        self.cls, self.setting = cls, "default" if cls == FULL else "set"

    def open(self, folder):
        import persistqueue

        queue = persistqueue.SQLiteAckQueue(folder, auto_commit=True, multithreading=True)
        for conn in (queue._putter, queue._getter):
            conn.execute(f"PRAGMA synchronous={self.cls}")
        return queue

    def close(self, queue):
        queue.close()

    def enqueue(self, queue, text):
        queue.put(text)

    def claim(self, queue):
        import persistqueue

        try:
            return queue.get(block=False)
        except persistqueue.exceptions.Empty:
            return None

    def wait(self, queue):
        return queue.get()

    def text(self, message):
        return message

    def ack(self, queue, message):
        queue.ack(message)

    def fill(self, queue, text, count):
        # It has no batches: the rows that `put` writes, by SQL.
        self.lay_out(queue, 1, text, count)
        queue.total += count

    def fill_behind(self, queue, state, text, count):
        from persistqueue.sqlackqueue import AckStatus

        statuses = {DONE: AckStatus.acked, DEAD: AckStatus.ack_failed}
        if state not in statuses:
            raise Unable
        self.lay_out(queue, int(statuses[state]), text, count)

    def lay_out(self, queue, status, text, count):
        data, now = queue._serializer.dumps(text), time.time()
        insert = f"INSERT INTO {queue._table_name} (data, timestamp, status) VALUES (?, ?, ?)"
        queue._putter.executemany(insert, ((data, now, status) for _ in range(count)))
        queue._putter.commit()

    def settings(self, queue):
        return version(), f"writes {ask(queue._putter)}, reads {ask(queue._getter)}"


class Huey(Contender):
    """Its storage. A claim deletes the row: there is no ack, and a worker that dies takes the task with it."""

    peer = "huey"
    cls, setting = FULL, "default"
    lacks = [
        ("W5", "no batches"),
        ("W6 behind delayed", "no delays in the table of tasks"),
        ("W6 behind gated", "no gates"),
        ("W6 behind done", "a claim deletes the row"),
        ("W6 behind dead", "no dead letters"),
        ("W7", "its consumer polls"),
    ]

    def open(self, folder):
        import huey

        return huey.SqliteHuey(filename=folder + "/q.db").storage

    def enqueue(self, queue, text):
        queue.enqueue(text.encode())

    def claim(self, queue):
        return queue.dequeue()

    def text(self, message):
        return bytes(message).decode()

    def ack(self, queue, message):
        pass

    def fill(self, queue, text, count):
        insert = "INSERT INTO task (queue, data, priority) VALUES (?, ?, ?)"
        with queue.db(commit=True) as cursor:
            cursor.executemany(insert, ((queue.name, text.encode(), 0) for _ in range(count)))

    def settings(self, queue):
        with queue.db() as cursor:
            return version(), ask(cursor)


CONTENDERS = {
    "litequeue": [LiteQueue(FULL), LiteQueue(NORMAL)],
    "persist-queue": [PersistQueue(FULL), PersistQueue(NORMAL)],
    "huey": [Huey()],
}

run(CONTENDERS[os.environ["PEER"]])
