//! HTTP/1: random messages of every framing and both versions, and how both ends read them.

use std::io;

use fastrand::Rng;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};

use super::{KEY, Omitted, bytes, rng, text, write_fields};

/// The requests of one connection, and the responses to them.
pub struct Connection {
    pub exchanges: Vec<Exchange>,
    /// The client sends all requests before it reads a response.
    pub pipelined: bool,
}

pub struct Exchange {
    pub request: Message,
    pub response: Message,
    /// The interim responses.
    pub interim: Vec<Message>,
    /// The client waits for 100 before it sends the body.
    pub expects: bool,
    /// Both ends go on without HTTP after the response.
    pub upgrades: bool,
}

/// A message that one end sends.
pub struct Message {
    pub head: Vec<u8>,
    pub body: Vec<u8>,
    /// The end of the connection is the end of the body.
    pub closes: bool,
}

/// A message that one end has received.
pub struct Received {
    /// Start line and fields, as they arrived.
    lines: Vec<Vec<u8>>,
    body: Vec<u8>,
    trailers: Vec<Vec<u8>>,
}

const METHODS: [&str; 10] = [
    "GET", "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "X-y'z~!",
];
const STATUSES: [&str; 15] = [
    "200 OK",
    "200 ",
    "201 Made It",
    "204 No Content",
    "206 Partial",
    "299 ",
    "301 Moved",
    "304 Not Modified",
    "400 Bad",
    "404 Not  Found",
    "418 I'm a teapot",
    "451 \u{a7}",
    "500 Oops",
    "501 No",
    "200 \t x",
];
/// The fields that random names must not hit: others of the same message would have another meaning.
const RESERVED: [&str; 13] = [
    "connection",
    "content-length",
    "exchange",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-called-by",
    "x-mesh-error",
];
const TOKEN: &[u8] =
    b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
const TARGET: &[u8] = b"//..--__~~!$&'()*+,;=:@0123456789abcdefABCDEF%%??";

impl Connection {
    pub fn new(seed: u64, number: u64) -> Self {
        let mut rng = rng(seed, number, 1);
        let count = *rng.choice(&[1, 1, 2, 4]).expect("there is one");
        let pipelined = rng.u8(..4) == 0;
        let mut exchanges: Vec<Exchange> = Vec::new();
        for index in 0..count {
            let is_last = index + 1 == count;
            exchanges.push(exchange(&mut rng, number, index, is_last, pipelined));
        }
        Self {
            exchanges,
            pipelined,
        }
    }
}

fn exchange(rng: &mut Rng, number: u64, index: usize, is_last: bool, pipelined: bool) -> Exchange {
    let is_old = is_last && rng.u8(..10) == 0;
    let upgrades = is_last && !pipelined && !is_old && rng.u8(..8) == 0;
    let method = if upgrades {
        "GET"
    } else {
        rng.choice(METHODS).expect("there is one")
    };
    let version = if is_old { "1.0" } else { "1.1" };
    let start = format!("{method} {} HTTP/{version}", target(rng, method));
    let mut fields = fields(rng);
    let mut add = |rng: &mut Rng, name: &str, value: &str| {
        let at = rng.usize(..=fields.len());
        fields.insert(at, line(&cased(rng, name), value.as_bytes()));
    };
    add(rng, KEY, &format!("{number}.{index}"));
    add(rng, "host", "differential.test");
    let (framing, body, expects) = match rng.u8(..10) {
        _ if upgrades => (Vec::new(), Vec::new(), false),
        0..4 => (Vec::new(), Vec::new(), false),
        4 => (line(&cased(rng, "content-length"), b"0"), Vec::new(), false),
        kind => {
            let (framing, body) = if kind < 8 || is_old {
                with_length(rng)
            } else {
                chunked(rng)
            };
            (framing, body, !pipelined && !is_old && rng.u8(..6) == 0)
        }
    };
    if expects {
        add(rng, "expect", "100-continue");
    }
    if upgrades {
        add(rng, "connection", "Upgrade");
        add(rng, "upgrade", "turns/1");
    } else if is_last && rng.u8(..3) == 0 {
        add(rng, "connection", "close");
    } else if rng.u8(..6) == 0 {
        add(rng, "connection", "x-hop, X-HOP-2");
        add(rng, "x-HOP", "1");
        add(rng, "keep-alive", "timeout=5");
        add(rng, "proxy-connection", "keep-alive");
    }
    if rng.u8(..8) == 0 {
        add(
            rng,
            "x-called-by",
            "spiffe://cluster.local/ns/forged/sa/forged",
        );
    }
    if rng.u8(..8) == 0 {
        add(rng, "te", "trailers");
        if rng.bool() {
            add(rng, "connection", "TE");
        }
    }
    if !framing.is_empty() {
        fields.insert(rng.usize(..=fields.len()), framing);
    }
    let request = Message {
        head: head(start.as_bytes(), &fields),
        body,
        closes: false,
    };
    let interim = if is_old || rng.u8(..6) > 0 {
        0
    } else {
        rng.usize(1..=3)
    };
    let interim = (0..interim).map(|_| {
        let start = rng.choice([
            "HTTP/1.1 103 Early Hints",
            "HTTP/1.1 102 Processing",
            "HTTP/1.1 199 ",
        ]);
        let lines = self::fields(rng);
        Message {
            head: head(start.expect("there is one").as_bytes(), &lines),
            body: Vec::new(),
            closes: false,
        }
    });
    Exchange {
        request,
        interim: interim.collect(),
        response: response(rng, method, is_old, is_last, upgrades),
        expects,
        upgrades,
    }
}

fn response(rng: &mut Rng, method: &str, is_old: bool, is_last: bool, upgrades: bool) -> Message {
    let mut fields = fields(rng);
    if upgrades {
        fields.push(line("Connection", b"upgrade"));
        fields.push(line("UPGRADE", b"turns/1"));
        let head = head(b"HTTP/1.1 101 Switching", &fields);
        return Message {
            head,
            body: Vec::new(),
            closes: false,
        };
    }
    let status = rng.choice(STATUSES).expect("there is one");
    let has_no_body = method == "HEAD" || status.starts_with("204") || status.starts_with("304");
    let (framing, body, closes) = match rng.u8(..10) {
        _ if status.starts_with("204") => (Vec::new(), Vec::new(), false),
        0 if is_last => (Vec::new(), bytes(rng), true),
        0..3 if !is_old => {
            let (framing, body) = chunked(rng);
            (framing, body, false)
        }
        _ => {
            let (framing, body) = with_length(rng);
            (framing, body, false)
        }
    };
    if !framing.is_empty() {
        fields.insert(rng.usize(..=fields.len()), framing);
    }
    if rng.u8(..8) == 0 {
        fields.push(line(&cased(rng, "x-mesh-error"), b"forged"));
        fields.push(line("Keep-Alive", b"timeout=5"));
    }
    // Without the field, a connection ends only after a body of unknown length.
    let says_so = is_last && rng.u8(..3) == 0;
    if says_so {
        fields.insert(rng.usize(..=fields.len()), line("Connection", b"close"));
    }
    let version = if is_old && rng.bool() { "1.0" } else { "1.1" };
    let start: Vec<u8> = format!("HTTP/{version} {status}")
        .chars()
        .map(|one| one as u8)
        .collect();
    let body = if has_no_body { Vec::new() } else { body };
    Message {
        head: head(&start, &fields),
        body,
        closes: closes && !has_no_body || says_so || is_old,
    }
}

fn target(rng: &mut Rng, method: &str) -> String {
    if method == "OPTIONS" && rng.bool() {
        return "*".to_owned();
    }
    let mut target = if rng.u8(..10) == 0 {
        "http://differential.test/"
    } else {
        "/"
    }
    .to_owned();
    for _ in 0..rng.usize(..40) {
        let byte = *rng.choice(TARGET).expect("there is one") as char;
        target.push(byte);
        if byte == '%' {
            target += &format!("{:02x}", rng.u8(..));
        }
    }
    target
}

/// Lines of fields with random names and values, some of them more than once.
fn fields(rng: &mut Rng) -> Vec<Vec<u8>> {
    let mut lines = Vec::new();
    for _ in 0..rng.usize(..8) {
        let name: String = if rng.bool() {
            (0..rng.usize(1..20))
                .map(|_| *rng.choice(TOKEN).expect("there is one") as char)
                .collect()
        } else {
            let known = [
                "Accept",
                "COOKIE",
                "set-cookie",
                "User-agent",
                "Authorization",
                "Via",
                "date",
                "traceparent",
                "Forwarded",
            ];
            (*rng.choice(known).expect("there is one")).to_owned()
        };
        if RESERVED
            .iter()
            .any(|reserved| name.eq_ignore_ascii_case(reserved))
        {
            continue;
        }
        for _ in 0..rng.usize(1..3) {
            let value = value(rng);
            lines.push(line(&name, &value));
        }
    }
    lines
}

/// The value of a field: visible characters, spaces and tabs between them, and bytes above ASCII.
fn value(rng: &mut Rng) -> Vec<u8> {
    let mut value: Vec<u8> = (0..rng.usize(..40))
        .map(|_| match rng.u8(..20) {
            0 => b'\t',
            1..3 => b' ',
            3 => rng.u8(0x80..),
            _ => rng.u8(0x21..0x7f),
        })
        .collect();
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t');
    while value.last().is_some_and(is_space) {
        value.pop();
    }
    let start = value.iter().take_while(|byte| is_space(byte)).count();
    value.split_off(start)
}

fn line(name: &str, value: &[u8]) -> Vec<u8> {
    [name.as_bytes(), b": ", value].concat()
}

fn cased(rng: &mut Rng, name: &str) -> String {
    let one = |letter: char| {
        if rng.bool() {
            letter.to_ascii_uppercase()
        } else {
            letter
        }
    };
    name.chars().map(one).collect()
}

fn head(start: &[u8], lines: &[Vec<u8>]) -> Vec<u8> {
    let mut head = [start, b"\r\n"].concat();
    for line in lines {
        head.extend([line, &b"\r\n"[..]].concat());
    }
    head.extend(b"\r\n");
    head
}

fn with_length(rng: &mut Rng) -> (Vec<u8>, Vec<u8>) {
    let body = bytes(rng);
    (
        line(
            &cased(rng, "content-length"),
            body.len().to_string().as_bytes(),
        ),
        body,
    )
}

/// Chunks with extensions, leading zeros and trailers.
fn chunked(rng: &mut Rng) -> (Vec<u8>, Vec<u8>) {
    let mut encoded = Vec::new();
    for _ in 0..rng.usize(..4) {
        let chunk = bytes(rng);
        if chunk.is_empty() {
            continue;
        }
        let size = match rng.u8(..3) {
            0 => format!("{:X}", chunk.len()),
            1 => format!("0{:x}", chunk.len()),
            _ => format!("{:x}", chunk.len()),
        };
        let extension = rng
            .choice(["", "", ";a", ";a=b;c=\"d;e\""])
            .expect("there is one");
        encoded.extend(
            format!("{size}{extension}\r\n")
                .bytes()
                .chain(chunk)
                .chain(*b"\r\n"),
        );
    }
    encoded.extend(b"0\r\n");
    for line in if rng.u8(..3) == 0 {
        fields(rng)
    } else {
        Vec::new()
    } {
        encoded.extend([&line, &b"\r\n"[..]].concat());
    }
    encoded.extend(b"\r\n");
    (line(&cased(rng, "transfer-encoding"), b"chunked"), encoded)
}

/// Reads the lines of a head or of a trailer section, without the empty one at its end. Returns
/// `None` at the end of the connection.
pub async fn read_lines(
    from: &mut (impl AsyncBufRead + Unpin),
    mut line: Vec<u8>,
) -> io::Result<Option<Vec<Vec<u8>>>> {
    let mut lines = Vec::new();
    loop {
        if !line.ends_with(b"\n") && from.read_until(b'\n', &mut line).await? == 0 {
            return if lines.is_empty() {
                Ok(None)
            } else {
                Err(cut())
            };
        }
        match line.strip_suffix(b"\r\n") {
            None => return Err(cut()),
            Some([]) => return Ok(Some(lines)),
            Some(content) => lines.push(content.to_vec()),
        }
        line.clear();
    }
}

fn cut() -> io::Error {
    io::Error::new(
        io::ErrorKind::UnexpectedEof,
        "a message is cut off, or a line ends without CR LF",
    )
}

impl Received {
    pub fn head(lines: Vec<Vec<u8>>) -> Self {
        Self {
            lines,
            body: Vec::new(),
            trailers: Vec::new(),
        }
    }

    /// Reads the body. A response to `method` may have one until the end of the connection.
    pub async fn read_body(
        mut self,
        from: &mut (impl AsyncBufRead + Unpin),
        method: Option<&str>,
    ) -> io::Result<Self> {
        let status = self.status();
        let is_empty = method == Some("HEAD")
            || self.is_interim()
            || ["101", "204", "304"].contains(&&*status);
        if method.is_some() && is_empty {
            return Ok(self);
        }
        if self.field("transfer-encoding").is_some() {
            self.read_chunks(from).await?;
        } else if let Some(length) = self.field("content-length") {
            let length = length.trim().parse().map_err(|_| cut())?;
            self.body.resize(length, 0);
            from.read_exact(&mut self.body).await?;
        } else if method.is_some() {
            from.read_to_end(&mut self.body).await?;
        }
        Ok(self)
    }

    async fn read_chunks(&mut self, from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<()> {
        loop {
            let mut line = Vec::new();
            from.read_until(b'\n', &mut line).await?;
            let line = String::from_utf8_lossy(&line);
            let digits = line.split([';', '\r']).next().unwrap_or_default();
            let size = usize::from_str_radix(digits, 16).map_err(|_| cut())?;
            if size == 0 {
                self.trailers = read_lines(from, Vec::new()).await?.ok_or_else(cut)?;
                return Ok(());
            }
            let at = self.body.len();
            self.body.resize(at + size, 0);
            from.read_exact(&mut self.body[at..]).await?;
            let mut end = [0; 2];
            from.read_exact(&mut end).await?;
            if &end != b"\r\n" {
                return Err(cut());
            }
        }
    }

    /// Another response follows. 101 is the last one of HTTP.
    pub fn is_interim(&self) -> bool {
        let status = self.status();
        status.starts_with('1') && status != "101"
    }

    fn status(&self) -> String {
        let start = String::from_utf8_lossy(&self.lines[0]);
        start.split(' ').nth(1).unwrap_or_default().to_owned()
    }

    /// The value of the first field with this name.
    pub fn field(&self, name: &str) -> Option<String> {
        let mut fields = self.lines[1..].iter().filter_map(|line| split(line));
        let (_, value) = fields.find(|(key, _)| key.eq_ignore_ascii_case(name.as_bytes()))?;
        Some(String::from_utf8_lossy(value).into_owned())
    }

    /// The message, except the fields that may differ, and those that its `Connection` fields list.
    /// The version belongs to the connection.
    pub fn transcript(&self, omitted: &Omitted) -> String {
        let fields = self.lines[1..].iter().filter_map(|line| split(line));
        let options = fields
            .clone()
            .filter(|(name, _)| name.eq_ignore_ascii_case(b"connection"));
        let options = options.flat_map(|(_, value)| value.split(|byte| *byte == b','));
        let options = options.map(|one| String::from_utf8_lossy(one).trim().to_owned());
        let part = if self.lines[0].starts_with(b"HTTP/") {
            "responses"
        } else {
            "requests"
        };
        let names: Vec<String> = omitted.of(part).into_iter().chain(options).collect();
        let start = self.lines[0].escape_ascii().to_string();
        let mut transcript = start.replace("HTTP/1.0", "HTTP/1.1") + "\n";
        write_fields(&mut transcript, fields, &names);
        transcript += &format!("  body {}\n", text(&self.body));
        let trailers = self.trailers.iter().filter_map(|line| split(line));
        write_fields(&mut transcript, trailers, &omitted.of("trailers"));
        transcript
    }
}

/// The name and the value of a field line. The colon and the spaces around the value stay with it,
/// except for the one space that is usual.
fn split(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = line.iter().position(|byte| *byte == b':')?;
    let value = &line[at + 1..];
    Some((&line[..at], value.strip_prefix(b" ").unwrap_or(value)))
}
