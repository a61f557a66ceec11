//! What the rows of the tables promise each other: one statement for each promise, which finds what breaks it. Each goes through its
//! tables once.

/// The statements, in the order of what they are about.
pub(crate) fn all() -> &'static [&'static str] {
    CHECKS
}

/// Each finds what its sentence says, and nothing in a healthy store.
const CHECKS: &[&str] = &[
    // The counters are the rows.
    "WITH counted AS (
       SELECT queue,
              count(*) FILTER (WHERE route = 'pending' AND (status = route OR line = -1)) AS pending,
              count(*) FILTER (WHERE route = 'routing' AND (status = route OR line = -1)) AS routing,
              count(*) FILTER (WHERE route = 'queued' AND (status = route OR line = -1)) AS queued,
              count(*) FILTER (WHERE route = 'pending_local' AND (status = route OR line = -1)) AS pending_local,
              count(*) FILTER (WHERE status = 'processing' AND line IS NOT -1) AS deferred,
              count(*) FILTER (WHERE status = 'done') AS done,
              count(*) FILTER (WHERE status = 'dead') AS dead,
              count(*) FILTER (WHERE status = 'cancelled') AS cancelled
         FROM main.relet_messages GROUP BY queue),
     tried AS (SELECT queue, count(*) AS retrying FROM main.relet_retry_queue WHERE reason IS NOT NULL GROUP BY queue)
     SELECT 'queue ' || n.name || ': its counters differ from its messages'
       FROM main.relet_queues n LEFT JOIN main.relet_counters q ON q.queue = n.id
            LEFT JOIN counted c ON c.queue = n.id LEFT JOIN tried t ON t.queue = n.id
      WHERE (q.pending, q.routing, q.queued, q.pending_local, q.deferred, q.done, q.dead, q.cancelled, q.retrying)
         IS NOT (ifnull(c.pending, 0), ifnull(c.routing, 0), ifnull(c.queued, 0), ifnull(c.pending_local, 0), ifnull(c.deferred, 0),
                 ifnull(c.done, 0), ifnull(c.dead, 0), ifnull(c.cancelled, 0), ifnull(t.retrying, 0))",
    "SELECT 'counters are left of queue ' || queue FROM main.relet_counters
      WHERE queue <> 0 AND queue NOT IN (SELECT id FROM main.relet_queues)",
    "SELECT 'queue ' || queue || ': the count of what was acked is below zero' FROM main.relet_counters WHERE acked < 0",
    "SELECT 'the store has lost the counter of its ids'
      WHERE NOT EXISTS (SELECT 1 FROM main.relet_counters WHERE queue = 0)",
    // No id is given out twice.
    "SELECT 'message ' || max(id) || ' has an id that has not been given out yet' FROM main.relet_messages
     HAVING max(id) > ifnull((SELECT last_id FROM main.relet_counters WHERE queue = 0), 0)",
    // Every message is of a queue.
    "SELECT 'message ' || id || ' belongs to no queue' FROM main.relet_messages
      WHERE queue NOT IN (SELECT id FROM main.relet_queues)",
    // What a row says of itself: the life of a message.
    "SELECT 'message ' || id || ' has the route ' || quote(route) || ', which there is not' FROM main.relet_messages
      WHERE route NOT IN ('pending', 'routing', 'queued', 'pending_local')",
    "SELECT 'message ' || id || ' has the status ' || quote(status) || ', which it cannot have' FROM main.relet_messages
      WHERE status NOT IN (route, 'processing', 'done', 'dead', 'cancelled')",
    "SELECT 'message ' || id || ': its worker, its start of that and its lease do not agree' FROM main.relet_messages
      WHERE (worker_id IS NULL) <> (incarnation IS NULL) OR (line IS NOT -1) <> (lease_ms IS NULL)
         OR (line = -1 AND (status <> 'processing' OR place IS NULL))
         OR (status = 'processing' AND line IS NOT -1 AND due_at IS NULL)",
    "SELECT 'message ' || id || ': its attempts or its crashes are below zero' FROM main.relet_messages
      WHERE attempts < 0 OR crashes < 0",
    // What can be claimed stands in its line, and nothing else.
    "SELECT 'message ' || m.id || ' stands in a line, and cannot be claimed' FROM main.relet_messages m
      WHERE m.line >= 0 AND (m.status <> m.route OR m.worker_id IS NOT NULL)",
    "SELECT 'message ' || id || ' has another place in its line than its priority says' FROM main.relet_messages
      WHERE (line >= 0 AND place IS NOT -priority) OR (line IS NULL AND place IS NOT NULL)",
    "SELECT 'message ' || m.id || ' stands in a line that is not its own'
       FROM main.relet_messages m LEFT JOIN main.relet_details d ON d.message = m.id
      WHERE m.line >= 0 AND m.line <> 4 * ifnull(d.gate, 0)
            + CASE m.route WHEN 'pending' THEN 0 WHEN 'routing' THEN 1 WHEN 'queued' THEN 2 ELSE 3 END",
    "SELECT 'message ' || m.id || ' waits for nothing, and stands in no line' FROM main.relet_messages m
      WHERE m.line IS NULL AND m.status = m.route
        AND NOT EXISTS (SELECT 1 FROM main.relet_retry_queue r WHERE r.queue = m.queue AND r.message = m.id)
        AND NOT EXISTS (SELECT 1 FROM main.relet_details d JOIN main.relet_groups g
                          ON g.queue = m.queue AND g.group_key = d.group_key AND g.message = d.message AND g.turn = 0
                         WHERE d.message = m.id)",
    // What lies beside a message, and what its row says of that.
    "SELECT 'message ' || m.id || ' has lost its details' FROM main.relet_messages m
      WHERE m.extras & 1 AND m.id NOT IN (SELECT message FROM main.relet_details)",
    "SELECT 'details are left of message ' || d.message
       FROM main.relet_details d LEFT JOIN main.relet_messages m ON m.id = d.message WHERE m.id IS NULL OR NOT m.extras & 1",
    "SELECT 'message ' || m.id || ' has lost its payload' FROM main.relet_messages m
      WHERE m.payload IS NULL AND (NOT m.extras & 2 OR m.id NOT IN (SELECT message FROM main.relet_payloads))",
    "SELECT 'a payload is left of message ' || p.message
       FROM main.relet_payloads p LEFT JOIN main.relet_messages m ON m.id = p.message WHERE m.id IS NULL OR NOT m.extras & 2",
    // Every gate that a message or a queue names is there.
    "SELECT 'message ' || message || ' passes a gate that there is not' FROM main.relet_details
      WHERE gate IS NOT NULL AND gate NOT IN (SELECT id FROM main.relet_gates)",
    "SELECT 'queue ' || name || ' has a gate that there is not' FROM main.relet_queues
      WHERE gate IS NOT NULL AND gate NOT IN (SELECT id FROM main.relet_gates)",
    "SELECT DISTINCT 'queue ' || q.name || ' has messages with a gate, and does not know it'
       FROM main.relet_details d JOIN main.relet_messages m ON m.id = d.message JOIN main.relet_queues q ON q.id = m.queue
      WHERE d.gate IS NOT NULL AND q.gated = 0",
    "SELECT 'message ' || m.id || ' holds a place at its gate that it has not, or none where it has'
       FROM main.relet_messages m JOIN main.relet_details d ON d.message = m.id AND d.gate IS NOT NULL
       LEFT JOIN main.relet_passed p ON p.gate = d.gate AND p.message = m.id
      WHERE (m.line IS NOT -1) <> (p.message IS NULL)",
    "SELECT 'a place at a gate is left of message ' || p.message
       FROM main.relet_passed p LEFT JOIN main.relet_details d ON d.message = p.message WHERE d.gate IS NOT p.gate",
    // The retry queue and the messages agree.
    "SELECT 'message ' || r.message || ' is in the retry queue, but does not wait for a retry'
       FROM main.relet_retry_queue r LEFT JOIN main.relet_messages m ON m.id = r.message
      WHERE m.id IS NULL OR m.queue <> r.queue OR m.due_at IS NOT r.due_at OR m.worker_id IS NOT r.worker_id
         OR m.line IS NOT NULL",
    "SELECT 'message ' || m.id || ' is deferred, but not in the retry queue' FROM main.relet_messages m
      WHERE m.status = 'processing' AND m.line IS NOT -1
        AND m.id NOT IN (SELECT message FROM main.relet_retry_queue)",
    "SELECT 'message ' || r.message || ' waits behind its group, or not, and the group says otherwise'
       FROM main.relet_retry_queue r LEFT JOIN main.relet_details d ON d.message = r.message
       LEFT JOIN main.relet_groups g ON g.queue = r.queue AND g.group_key = d.group_key AND g.message = r.message
      WHERE r.behind <> (ifnull(g.turn, 1) = 0)",
    // Keys, groups and times to live are known of live messages, and of no others.
    "SELECT 'message ' || m.id || ' has a key that is not kept for it'
       FROM main.relet_messages m JOIN main.relet_details d ON d.message = m.id AND d.key IS NOT NULL
       LEFT JOIN main.relet_keys k ON k.queue = m.queue AND k.key = d.key
      WHERE m.status IN (m.route, 'processing') AND k.message IS NOT m.id",
    "SELECT 'a key is left of message ' || k.message
       FROM main.relet_keys k LEFT JOIN main.relet_messages m ON m.id = k.message LEFT JOIN main.relet_details d ON d.message = m.id
      WHERE m.queue IS NOT k.queue OR d.key IS NOT k.key OR m.status NOT IN (m.route, 'processing')",
    "SELECT 'message ' || m.id || ' is in no group, and belongs to one'
       FROM main.relet_messages m JOIN main.relet_details d ON d.message = m.id AND d.group_key IS NOT NULL
       LEFT JOIN main.relet_groups g ON g.queue = m.queue AND g.group_key = d.group_key AND g.message = m.id
      WHERE m.status IN (m.route, 'processing') AND g.message IS NULL",
    "SELECT 'a place in a group is left of message ' || g.message
       FROM main.relet_groups g LEFT JOIN main.relet_messages m ON m.id = g.message LEFT JOIN main.relet_details d ON d.message = m.id
      WHERE m.queue IS NOT g.queue OR d.group_key IS NOT g.group_key OR m.status NOT IN (m.route, 'processing')",
    "SELECT 'message ' || m.id || ' has a time to live that does not run'
       FROM main.relet_messages m JOIN main.relet_details d ON d.message = m.id AND d.expires_at IS NOT NULL
       LEFT JOIN main.relet_expiry e ON e.expires_at = d.expires_at AND e.message = m.id
      WHERE m.status = m.route AND e.message IS NULL",
    "SELECT 'a time to live is left of message ' || e.message
       FROM main.relet_expiry e LEFT JOIN main.relet_messages m ON m.id = e.message LEFT JOIN main.relet_details d ON d.message = m.id
      WHERE d.expires_at IS NOT e.expires_at OR m.status IS NOT m.route",
    // A group has one turn, and it is the right member's.
    "SELECT 'group ' || group_key || ': nobody has its turn' FROM main.relet_groups
      GROUP BY queue, group_key HAVING sum(turn) <> 1",
    "SELECT 'group ' || g.group_key || ': message ' || g.message || ' has the turn before a smaller one'
       FROM main.relet_groups g JOIN main.relet_messages m ON m.id = g.message
      WHERE g.turn = 1 AND m.status <> 'processing'
        AND EXISTS (SELECT 1 FROM main.relet_groups o WHERE o.queue = g.queue AND o.group_key = g.group_key AND o.message < g.message)",
    "SELECT 'message ' || g.message || ' stands in a line before its turn'
       FROM main.relet_groups g JOIN main.relet_messages m ON m.id = g.message WHERE g.turn = 0 AND m.line IS NOT NULL",
    // What is finished is known as such, and nothing else.
    "SELECT 'message ' || m.id || ' is finished, and it is not known when' FROM main.relet_messages m
       LEFT JOIN main.relet_finished f ON f.message = m.id
      WHERE m.status IN ('done', 'dead', 'cancelled') AND f.status IS NOT m.status",
    "SELECT 'an end is left of message ' || f.message FROM main.relet_finished f
       LEFT JOIN main.relet_messages m ON m.id = f.message WHERE m.status IS NOT f.status",
    "SELECT 'message ' || message || ' is kept for ever, or not for as long as a dead letter is' FROM main.relet_finished
      WHERE (status IN ('done', 'cancelled')) <> (keep_until IS NOT NULL)",
    // What no row may hold: SQLite does not look at CHECKs where it only reads.
    "SELECT 'message ' || m.id || ' cannot be read: a number or a name in its row is none that there can be'
       FROM main.relet_messages m LEFT JOIN main.relet_details d ON d.message = m.id
      WHERE m.attempts NOT BETWEEN 0 AND 4294967295 OR m.crashes NOT BETWEEN 0 AND 4294967295
         OR m.max_attempts NOT BETWEEN 0 AND 4294967295 OR m.priority NOT BETWEEN -2147483648 AND 2147483647
         OR m.payload_crc NOT BETWEEN 0 AND 4294967295 OR d.max_deferrals NOT BETWEEN 0 AND 4294967295
         OR d.deferrals NOT BETWEEN 0 AND 4294967295 OR d.releases NOT BETWEEN 0 AND 4294967295
         OR d.redrives NOT BETWEEN 0 AND 4294967295",
    "SELECT 'message ' || id || ' is in processing without a worker, or has one without being so' FROM main.relet_messages
      WHERE (status = 'processing') <> (worker_id IS NOT NULL)",
    "SELECT 'message ' || id || ': something lies beside it that is not known' FROM main.relet_messages WHERE extras & ~3",
    "SELECT 'message ' || id || ' stands in a line that there is not' FROM main.relet_messages WHERE line < -1",
    "SELECT 'message ' || id || ': its token or its epoch is below zero' FROM main.relet_messages WHERE token < 0 OR epoch < 0",
    "SELECT 'message ' || id || ' has an epoch that the store has not come to' FROM main.relet_messages
      WHERE epoch > (SELECT value FROM main.relet_meta WHERE key = 'epoch' AND typeof(value) = 'integer')",
    "SELECT 'message ' || id || ' is of a start of its worker that has not been' FROM main.relet_messages
      WHERE incarnation < 0
         OR incarnation > ifnull((SELECT value FROM main.relet_meta WHERE key = 'incarnation' AND typeof(value) = 'integer'), 0)",
    "SELECT 'worker ' || label || ' is of a start that has not been' FROM main.relet_workers
      WHERE incarnation < 1
         OR incarnation > ifnull((SELECT value FROM main.relet_meta WHERE key = 'incarnation' AND typeof(value) = 'integer'), 0)",
    "SELECT 'queue ' || name || ': a setting of it is none that there can be' FROM main.relet_queues
      WHERE gated NOT IN (0, 1) OR ageing_ms <= 0 OR lease_ms <= 0 OR max_attempts NOT BETWEEN 1 AND 4294967295",
    "SELECT 'gate ' || name || ': a limit of it is none that there can be' FROM main.relet_gates
      WHERE slots <= 0 OR window <= 0 OR rate <= 0 OR period_ms <= 0 OR burst <= 0
         OR slots > 4294967295 OR window > 4294967295 OR rate > 4294967295 OR burst > 4294967295
         OR (rate IS NULL) <> (period_ms IS NULL)
         OR (rate IS NULL) <> (burst IS NULL) OR (rate IS NULL) <> (full_at IS NULL)",
    "SELECT 'schedule ' || name || ': a setting of it is none that there can be' FROM main.relet_schedules
      WHERE every_ms <= 0 OR catch_up < 0 OR (every_ms IS NULL) <> (cron IS NOT NULL) OR (cron IS NULL) <> (time_zone IS NULL)
         OR (missed_from IS NULL) <> (missed_to IS NULL)",
    "SELECT 'message ' || message || ': its turn in its group is neither had nor waited for' FROM main.relet_groups
      WHERE turn NOT IN (0, 1)",
    "SELECT 'message ' || message || ': its row in the retry queue says what cannot be' FROM main.relet_retry_queue
      WHERE behind NOT IN (0, 1) OR (worker_id IS NULL) <> (kept_until IS NULL) OR count NOT BETWEEN 0 AND 4294967295",
    "SELECT 'message ' || id || ': its lease is shorter than a millisecond' FROM main.relet_messages WHERE lease_ms < 1",
    // Instants lie between 1970 and the year 9999.
    "SELECT 'message ' || id || ' has an instant before 1970 or after the year 9999' FROM main.relet_messages
      WHERE enqueued_at NOT BETWEEN 0 AND 253402300799999 OR claimed_at NOT BETWEEN 0 AND 253402300799999
         OR due_at NOT BETWEEN 0 AND 253402300799999",
    "SELECT 'message ' || message || ' has a tick or a time to live before 1970 or after the year 9999' FROM main.relet_details
      WHERE tick_at NOT BETWEEN 0 AND 253402300799999 OR expires_at NOT BETWEEN 0 AND 253402300799999",
    "SELECT 'message ' || message || ' has ended before 1970 or after the year 9999' FROM main.relet_finished
      WHERE finished_at NOT BETWEEN 0 AND 253402300799999 OR keep_until NOT BETWEEN 0 AND 253402300799999",
    "SELECT 'queue ' || name || ' is paused until before 1970 or after the year 9999' FROM main.relet_queues
      WHERE paused_until NOT BETWEEN 0 AND 253402300799999",
    "SELECT 'gate ' || name || ' is closed until before 1970 or after the year 9999' FROM main.relet_gates
      WHERE closed_until NOT BETWEEN 0 AND 253402300799999",
    "SELECT 'schedule ' || name || ' has a tick before 1970 or after the year 9999' FROM main.relet_schedules
      WHERE next_at NOT BETWEEN 0 AND 253402300799999 OR last_at NOT BETWEEN 0 AND 253402300799999",
    // What is JSON can be read as such.
    "SELECT 'queue ' || name || ': its backoff is no JSON' FROM main.relet_queues WHERE retry IS NOT NULL AND NOT json_valid(retry)",
    "SELECT 'message ' || message || ': its backoff is no JSON' FROM main.relet_details
      WHERE retry IS NOT NULL AND NOT json_valid(retry)",
    "SELECT 'schedule ' || name || ': its options are no JSON' FROM main.relet_schedules WHERE NOT json_valid(options)",
];
