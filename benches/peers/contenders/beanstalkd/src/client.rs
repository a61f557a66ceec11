//! Its protocol, as far as the bench needs it, one command and one answer at a time.

use std::io::{BufRead, BufReader, Read as _, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use driver::{Answer, Handle, Read, State, unable};

const TIME_TO_RUN: u32 = 60;
const LONG: u32 = 7 * 24 * 3600;

pub struct Client {
    writer: UnixStream,
    reader: BufReader<UnixStream>,
    line: String,
    body: Vec<u8>,
    held: Option<u64>,
}

impl Client {
    pub fn connect(socket: PathBuf) -> Answer<Client> {
        let connect = || {
            let writer = UnixStream::connect(socket)?;
            let reader = BufReader::new(writer.try_clone()?);
            Ok(Client { writer, reader, line: String::new(), body: Vec::new(), held: None })
        };
        connect().map_err(|error: std::io::Error| error.to_string())
    }

    fn send(&mut self, bytes: &[u8]) -> Answer<()> {
        self.writer.write_all(bytes).map_err(|error| error.to_string())
    }

    /// The words of the next line.
    fn answer(&mut self) -> Answer<Vec<String>> {
        self.line.clear();
        self.reader.read_line(&mut self.line).map_err(|error| error.to_string())?;
        Ok(self.line.split_whitespace().map(str::to_owned).collect())
    }

    fn put_command(payload: &[u8], delay: u32) -> Vec<u8> {
        let mut command = format!("put 0 {delay} {TIME_TO_RUN} {}\r\n", payload.len()).into_bytes();
        command.extend_from_slice(payload);
        command.extend_from_slice(b"\r\n");
        command
    }

    fn expect_inserted(&mut self) -> Answer<()> {
        let answer = self.answer()?;
        if answer.first().is_some_and(|word| word == "INSERTED") { Ok(()) } else { Err(answer.join(" ")) }
    }

    /// Sends many before it reads the answers: only to lay out what is not timed.
    fn put_many(&mut self, payload: &[u8], delay: u32, count: usize) -> Answer<()> {
        const AT_ONCE: usize = 16;
        let command = Client::put_command(payload, delay);
        let mut left = count;
        while left > 0 {
            let part = if payload.len() > 4096 { 1 } else { left.min(AT_ONCE) };
            self.send(&command.repeat(part))?;
            for _ in 0..part {
                self.expect_inserted()?;
            }
            left -= part;
        }
        Ok(())
    }

    fn reserve(&mut self, command: &[u8], read: Read) -> Answer<bool> {
        self.send(command)?;
        let answer = self.answer()?;
        match answer.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
            ["RESERVED", id, bytes] => {
                let (id, bytes) = (id.parse().ok(), bytes.parse::<usize>().map_err(|error| error.to_string())?);
                self.body.resize(bytes + 2, 0);
                self.reader.read_exact(&mut self.body).map_err(|error| error.to_string())?;
                read(&self.body[..bytes]);
                self.held = id;
                Ok(true)
            }
            ["TIMED_OUT"] => Ok(false),
            other => Err(other.join(" ")),
        }
    }
}

impl Handle for Client {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        self.send(&Client::put_command(payload, 0))?;
        self.expect_inserted()
    }

    fn claim(&mut self, read: Read) -> Answer<bool> {
        self.reserve(b"reserve-with-timeout 0\r\n", read)
    }

    fn wait(&mut self, read: Read) -> Answer<()> {
        if self.reserve(b"reserve-with-timeout 30\r\n", read)? { Ok(()) } else { Err("nothing came".into()) }
    }

    fn ack(&mut self) -> Answer<()> {
        let Some(id) = self.held.take() else { return Ok(()) };
        self.send(format!("delete {id}\r\n").as_bytes())?;
        let answer = self.answer()?;
        if answer == ["DELETED"] { Ok(()) } else { Err(answer.join(" ")) }
    }

    fn fill(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        self.put_many(payload, 0, count)
    }

    fn fill_behind(&mut self, state: State, payload: &[u8], count: usize) -> Answer<()> {
        match state {
            State::Delayed => self.put_many(payload, LONG, count),
            // Its dead letters are what was buried.
            State::Dead => {
                for _ in 0..count {
                    self.enqueue(payload)?;
                    self.claim(&mut |_| {})?;
                    let id = self.held.take().ok_or("nothing to bury")?;
                    self.send(format!("bury {id} 0\r\n").as_bytes())?;
                    self.answer()?;
                }
                Ok(())
            }
            State::Gated | State::Done => unable(),
        }
    }
}
