//! The house stands: imports look down, SQL has its places, one file reads the clocks, and the library is silent.

use std::path::{Path, PathBuf};

/// The floors, from below. A file may name those below it, and its neighbours.
const FLOORS: [&[&str]; 7] = [
    &["error", "message", "receipt", "state", "retry", "clock", "options", "view", "random", "cancel", "cron"],
    &["db", "boot", "files", "presence", "sql", "reserve", "spool"],
    &["waker", "watcher", "batch", "follower", "seat", "writer", "liveness"],
    &[
        "store",
        "queue",
        "claim",
        "worker",
        "backup",
        "repair",
        "gate",
        "outcome",
        "payload",
        "monitor",
        "prometheus",
        "schedule",
        "ticket",
        "transfer",
        "restore",
    ],
    &["pool"],
    &["workers"],
    &["lib", "cost"],
];

fn floor(module: &str) -> Option<usize> {
    FLOORS.iter().position(|modules| modules.contains(&module))
}

struct Source {
    /// Below src, with slashes: "sql/claim.rs".
    name: String,
    text: String,
}

impl Source {
    /// The module at the top that it is, or that it is in: "sql".
    fn module(&self) -> &str {
        let first = self.name.split('/').next().unwrap_or_default();
        first.strip_suffix(".rs").unwrap_or(first)
    }

    fn is_library(&self) -> bool {
        !self.name.starts_with("bin/")
    }

    fn place(&self, at: usize) -> String {
        format!("src/{}:{}", self.name, self.text[..at].matches('\n').count() + 1)
    }
}

fn sources() -> Vec<Source> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.extension() {
                _ if path.is_dir() => walk(&path, found),
                Some(extension) if extension == "rs" => found.push(path),
                _ => {}
            }
        }
    }
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut paths = Vec::new();
    walk(&src, &mut paths);
    paths.sort();
    let name = |path: &Path| path.strip_prefix(&src).unwrap().to_str().unwrap().replace('\\', "/");
    paths.iter().map(|path| Source { name: name(path), text: std::fs::read_to_string(path).unwrap() }).collect()
}

/// What a piece of a source is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Code,
    Comment,
    /// A string or character literal, with its quotes.
    Literal,
}

/// Cuts a source into code, comments and literals: (kind, where it begins, where it ends).
fn pieces(text: &str) -> Vec<(Kind, usize, usize)> {
    let bytes = text.as_bytes();
    let mut pieces = Vec::new();
    let (mut at, mut code) = (0, 0);
    while at < bytes.len() {
        let rest = &text[at..];
        let before = at.checked_sub(1).map(|before| bytes[before]);
        let in_word = before.is_some_and(|b| b.is_ascii_alphanumeric() || b == b'_');
        let (kind, length) = if rest.starts_with("//") {
            (Kind::Comment, rest.find('\n').unwrap_or(rest.len()))
        } else if rest.starts_with("/*") {
            (Kind::Comment, rest.find("*/").map_or(rest.len(), |end| end + 2))
        } else if !in_word && (rest.starts_with("r\"") || rest.starts_with("r#")) && raw_length(rest).is_some() {
            (Kind::Literal, raw_length(rest).unwrap_or_default())
        } else if rest.starts_with('"') {
            (Kind::Literal, quoted_length(rest, '"'))
        } else if rest.starts_with('\'') && is_char(rest) {
            (Kind::Literal, quoted_length(rest, '\''))
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
            continue;
        };
        pieces.push((Kind::Code, code, at));
        pieces.push((kind, at, at + length));
        at += length;
        code = at;
    }
    pieces.push((Kind::Code, code, bytes.len()));
    pieces
}

fn quoted_length(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

fn raw_length(text: &str) -> Option<usize> {
    let hashes = text[1..].bytes().take_while(|b| *b == b'#').count();
    let start = 1 + hashes + 1;
    if text.as_bytes().get(1 + hashes) != Some(&b'"') {
        return None;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    text[start..].find(&end).map(|at| start + at + end.len())
}

/// A character literal rather than a lifetime.
fn is_char(text: &str) -> bool {
    let mut chars = text.chars().skip(1);
    match chars.next() {
        Some('\\') => true,
        Some(_) => chars.next() == Some('\''),
        None => false,
    }
}

/// Where the tests of a file begin: they may do what the rest may not.
fn tests_begin(source: &Source) -> usize {
    source.text.find("#[cfg(test)]").unwrap_or(source.text.len())
}

/// The pieces of one kind, outside of a file's own tests.
fn of_kind(source: &Source, wanted: Kind) -> Vec<(usize, &str)> {
    let end = tests_begin(source);
    let pieces = pieces(&source.text).into_iter().filter(|(kind, at, _)| *kind == wanted && *at < end);
    pieces.map(|(_, from, to)| (from, &source.text[from..to.min(end.max(from))])).collect()
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Where this stands in the code as words of its own.
fn words(code: &str, words: &str) -> Vec<usize> {
    // What begins or ends with a sign needs no border there.
    let joined = |at: usize| {
        code[..at].ends_with(is_word) || words.ends_with(is_word) && code[at + words.len()..].starts_with(is_word)
    };
    code.match_indices(words).filter(|(at, _)| !joined(*at)).map(|(at, _)| at).collect()
}

#[track_caller]
fn none(found: Vec<String>) {
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn every_file_has_its_floor() {
    for source in sources().iter().filter(|source| source.is_library()) {
        assert!(floor(source.module()).is_some(), "src/{} is on no floor: give it one in this test", source.name);
    }
}

#[test]
fn imports_only_look_down() {
    let mut found = Vec::new();
    for source in sources().iter().filter(|source| source.is_library()) {
        let own = floor(source.module()).unwrap_or(usize::MAX);
        for (from, code) in of_kind(source, Kind::Code) {
            for at in words(code, "crate::") {
                let rest = &code[at + "crate::".len()..];
                // `use crate::{a, b}` would hide names from this test.
                if rest.starts_with('{') {
                    found.push(format!("{}: name each module in a `use` of its own", source.place(from + at)));
                    continue;
                }
                let module: String = rest.chars().take_while(|c| is_word(*c)).collect();
                match floor(&module) {
                    Some(floor) if floor <= own => {}
                    _ => found.push(format!("{}: looks up to crate::{module}", source.place(from + at))),
                }
            }
        }
    }
    none(found);
}

/// The command line proves that the public API is enough.
#[test]
fn the_command_line_uses_the_public_api_only() {
    let mut found = Vec::new();
    for source in sources().iter().filter(|source| !source.is_library()) {
        let is_demo = source.name.ends_with("/demo.rs");
        for (from, code) in of_kind(source, Kind::Code) {
            for at in words(code, "rusqlite").into_iter().chain(words(code, "r2d2")) {
                if !is_demo {
                    found.push(format!("{}: goes past the API, to the database", source.place(from + at)));
                }
            }
        }
        for (at, literal) in of_kind(source, Kind::Literal) {
            if let Some(verb) = sql_verb(literal)
                && !is_demo
            {
                found.push(format!("{}: has a statement, {verb}", source.place(at)));
            }
        }
    }
    none(found);
}

const VERBS: [&str; 21] = [
    "SELECT",
    "INSERT",
    "UPDATE",
    "DELETE",
    "CREATE",
    "DROP",
    "ALTER",
    "WITH",
    "REPLACE",
    "VALUES",
    "VACUUM",
    "ATTACH",
    "DETACH",
    "ANALYZE",
    "REINDEX",
    "PRAGMA",
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "SAVEPOINT",
    "RELEASE",
];
/// What a connection is set up with and a transaction is made of: these have no tables.
const FRAME: [&str; 4] = ["PRAGMA", "BEGIN", "COMMIT", "ROLLBACK"];

/// The SQL verbs with which the statements of a literal begin.
fn sql_verbs(literal: &str) -> Vec<&'static str> {
    let text = literal.trim_start_matches(['r', '#', '"']);
    text.split(';')
        .filter_map(|statement| {
            let statement = statement.trim_start();
            let verb = statement.split(|c: char| !c.is_ascii_uppercase()).next()?;
            // A word in capitals that goes on in small letters is an ordinary sentence.
            let ends = !statement[verb.len()..].starts_with(is_word);
            VERBS.iter().find(|known| **known == verb).copied().filter(|_| ends)
        })
        .collect()
}

fn sql_verb(literal: &str) -> Option<&'static str> {
    sql_verbs(literal).first().copied()
}

#[test]
fn sql_stands_in_its_places_only() {
    let mut found = Vec::new();
    for source in sources().iter().filter(|source| source.is_library() && source.module() != "sql") {
        let frame = matches!(&*source.name, "db.rs" | "seat.rs");
        for (at, literal) in of_kind(source, Kind::Literal) {
            for verb in sql_verbs(literal) {
                if !(frame && FRAME.contains(&verb)) {
                    found.push(format!("{}: {verb}", source.place(at)));
                }
            }
        }
    }
    none(found);
}

/// Unqualified, a name may be that of a TEMP table, or of one in an ATTACHed file.
#[test]
fn every_table_in_a_statement_is_main_s() {
    // Names of a statement's own (WITH), and words that follow these keywords without being a table.
    const NOT_TABLES: [&str; 5] = ["counted", "tried", "step", "SET", "OF"];
    let mut found = Vec::new();
    let mut statements = 0;
    for source in sources().iter().filter(|source| source.module() == "sql") {
        for (at, literal) in of_kind(source, Kind::Literal) {
            let literal = literal.trim_start_matches(['r', '#', '"']).trim_end_matches(['"', '#']);
            // Also the tails of the statements whose head a macro holds.
            let tail = ["WHERE ", "INDEXED BY "].iter().any(|word| literal.trim_start().starts_with(word));
            if sql_verb(literal).is_none() && !tail {
                continue;
            }
            statements += 1;
            for keyword in ["FROM", "JOIN", "INTO", "UPDATE", "TABLE"] {
                for word in words(literal, keyword) {
                    let rest = literal[word + keyword.len()..].trim_start();
                    let name: String = rest.chars().take_while(|c| is_word(*c) || *c == '.').collect();
                    let fine = rest.is_empty()
                        || rest.starts_with(['(', '?'])
                        || name.starts_with("main.")
                        || NOT_TABLES.contains(&&*name);
                    if !fine {
                        found.push(format!("{}: {keyword} {name}", source.place(at + word)));
                    }
                }
            }
        }
    }
    assert!(statements > 60, "the statements are found: {statements}");
    none(found);
}

#[test]
fn only_one_file_reads_the_clocks() {
    let mut found = Vec::new();
    for source in sources().iter().filter(|source| source.is_library() && source.name != "clock.rs") {
        for (from, code) in of_kind(source, Kind::Code) {
            for reads in ["Instant::now", "SystemTime::now", "Instant", "clock_gettime", "UNIX_EPOCH"] {
                found.extend(words(code, reads).iter().map(|at| format!("{}: {reads}", source.place(from + at))));
            }
        }
        // The database has a clock of its own.
        for (from, literal) in of_kind(source, Kind::Literal).into_iter().filter(|(_, text)| sql_verb(text).is_some()) {
            for reads in
                ["CURRENT_TIMESTAMP", "CURRENT_TIME", "strftime", "julianday", "unixepoch", "datetime(", "'now'"]
            {
                if literal.contains(reads) {
                    found.push(format!("{}: {reads}", source.place(from)));
                }
            }
        }
    }
    found.dedup();
    none(found);
}

#[test]
fn the_library_says_nothing_and_leaves_nothing_undone() {
    let mut found = Vec::new();
    for source in sources() {
        let mut refused = vec!["dbg!", "todo!", "unimplemented!"];
        if source.is_library() {
            refused.extend(["println!", "eprintln!", "print!", "eprint!", "process::exit", "process::abort"]);
        }
        for (from, code) in of_kind(&source, Kind::Code) {
            for says in &refused {
                found.extend(words(code, says).iter().map(|at| format!("{}: {says}", source.place(from + at))));
            }
        }
    }
    none(found);
}

#[test]
fn nothing_is_unsafe() {
    let mut found = Vec::new();
    for source in sources() {
        // In the files' own tests, too.
        for (_, from, to) in pieces(&source.text).into_iter().filter(|(kind, ..)| *kind == Kind::Code) {
            let code = &source.text[from..to];
            found.extend(words(code, "unsafe").iter().map(|at| format!("{}: unsafe", source.place(from + at))));
        }
    }
    none(found);
}

/// The front door has documentation, names, and no logic.
#[test]
fn the_front_door_has_no_logic() {
    let sources = sources();
    let lib = sources.iter().find(|source| source.name == "lib.rs").unwrap();
    for (_, code) in of_kind(lib, Kind::Code) {
        for item in ["fn", "struct", "enum", "impl", "trait", "macro_rules!", "const", "static"] {
            assert!(words(code, item).is_empty(), "src/lib.rs has `{item}`");
        }
    }
}

/// What these tests rest on: that code, comments and literals are told apart.
#[test]
fn a_source_is_cut_where_it_should_be() {
    let text =
        "let a = \"x // \\\" y\"; // b \"c\"\nlet d: &'a str = r#\"e \" f\"#; let g = '\"'; let h = '\\''; /* i */ j";
    let of = |wanted: Kind| {
        let pieces = pieces(text).into_iter().filter(|(kind, from, to)| *kind == wanted && from < to);
        pieces.map(|(_, from, to)| &text[from..to]).collect::<Vec<_>>()
    };
    assert_eq!(of(Kind::Literal), ["\"x // \\\" y\"", "r#\"e \" f\"#", "'\"'", "'\\''"]);
    assert_eq!(of(Kind::Comment), ["// b \"c\"", "/* i */"]);
    assert_eq!(of(Kind::Code).concat(), "let a = ; \nlet d: &'a str = ; let g = ; let h = ;  j");
    assert_eq!(sql_verbs("\"PRAGMA a = b; BEGIN IMMEDIATE\""), ["PRAGMA", "BEGIN"]);
    assert_eq!(sql_verb("\"Selected\""), None);
    assert_eq!(sql_verb("\"SELECTED\""), None);
}
