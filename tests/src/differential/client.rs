//! The raw client: sends each exchange through the mesh and past it, and compares the transcripts of
//! both ends.

use std::cell::Cell;
use std::fmt::Write;
use std::future::poll_fn;
use std::io;
use std::ops::Range;
use std::rc::Rc;

use h2::client::ResponseFuture;
use tokio::io::{AsyncBufRead, AsyncReadExt, AsyncWriteExt, BufReader, join};
use tokio::net::TcpStream;
use tokio::task::{JoinSet, spawn_local};
use tokio::time::timeout;

use super::http1::{Connection, Exchange, Message, Received, read_lines};
use super::opaque::Script;
use super::{
    DIRECT, MESH, Omitted, SERVER_FIRST, TIMEOUT, TRANSCRIPTS, big_endian, http2, pieces, rng,
};

/// The number of exchanges at a time.
const CONCURRENT: usize = 8;
/// The number of differences that are printed.
const MAX_PRINTED: usize = 20;

/// The client of one run.
pub struct Client {
    /// The address of the server, without a port.
    pub server: String,
    /// The seed of the exchanges.
    pub seed: u64,
    /// The names of the fields that may differ.
    pub omitted: Omitted,
}

/// The number of connections and exchanges, and of connections with a difference.
#[derive(Default)]
struct Counts {
    /// There is one connection: its transcripts are printed whole.
    is_alone: bool,
    exchanges: Cell<u64>,
    differences: Cell<u64>,
}

/// Compares the connections with these numbers. Prints differences, and the counts at the end.
/// Returns whether there is no difference.
pub async fn compare(client: Client, numbers: Range<u64>) -> bool {
    let total = numbers.end - numbers.start;
    let counts = Counts {
        is_alone: total == 1,
        ..Counts::default()
    };
    let (client, counts) = (Rc::new(client), Rc::new(counts));
    let mut running = JoinSet::new();
    for number in numbers {
        if running.len() == CONCURRENT {
            running.join_next().await;
        }
        let (client, counts) = (client.clone(), counts.clone());
        running.spawn_local(async move { client.compare_one(number, &counts).await });
    }
    while running.join_next().await.is_some() {}
    let (exchanges, differences) = (counts.exchanges.get(), counts.differences.get());
    println!(
        "seed={} connections={total} exchanges={exchanges} differences={differences}",
        client.seed
    );
    differences == 0
}

impl Client {
    async fn compare_one(&self, number: u64, counts: &Counts) {
        let (direct, exchanges) = self.run(number, DIRECT).await;
        let (mesh, _) = self.run(number, MESH).await;
        counts.exchanges.update(|count| count + exchanges);
        if direct != mesh {
            counts.differences.update(|count| count + 1);
            if counts.differences.get() <= MAX_PRINTED as u64 {
                println!(
                    "connection {number}, - without the mesh, + with it:\n{}",
                    difference(&direct, &mesh, counts.is_alone)
                );
            }
        }
    }

    /// The transcripts of both ends, and the number of exchanges.
    async fn run(&self, number: u64, way: u16) -> (String, u64) {
        match rng(self.seed, number, 0).u8(..10) {
            0 => (self.opaque(number, way).await, 1),
            1 => (self.server_first(way).await, 1),
            2..4 => self.http2(number, way).await,
            _ => self.http1(number, way).await,
        }
    }

    async fn connect(&self, port: u16) -> io::Result<TcpStream> {
        let stream = TcpStream::connect((&*self.server, port)).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    async fn opaque(&self, number: u64, way: u16) -> String {
        let script = Script::numbered(self.seed, number, 3);
        let own = async { script.run(&mut self.connect(way).await?, true, 0).await };
        let own = within(own).await;
        self.as_scripted(&script, true, own, way, &number.to_string())
            .await
    }

    /// The number of the server's script is in its first bytes.
    async fn server_first(&self, way: u16) -> String {
        let mut number = [0; 9];
        let mut script = Script::new(0, 0, 0);
        let own = async {
            let mut stream = self.connect(way + SERVER_FIRST).await?;
            stream.read_exact(&mut number).await?;
            script = Script::numbered(self.seed, big_endian(&number[1..]), 4);
            script.run(&mut stream, false, number.len()).await
        };
        let own = within(own).await;
        let key = format!("first-{}", big_endian(&number[1..]));
        self.as_scripted(&script, false, own, way, &key).await
    }

    /// The differences from the script at either end.
    async fn as_scripted(
        &self,
        script: &Script,
        begins: bool,
        own: String,
        way: u16,
        key: &str,
    ) -> String {
        let server = self.received(way, key).await;
        let mut transcript = String::new();
        for (end, received, expected) in [
            ("client", own, script.expected(begins)),
            ("server", server, script.expected(!begins)),
        ] {
            if received == expected {
                transcript += &format!("the {end} received what the script says\n");
            } else {
                transcript += &format!("the {end} received\n{received}in place of\n{expected}");
            }
        }
        transcript
    }

    async fn http1(&self, number: u64, way: u16) -> (String, u64) {
        let connection = Connection::new(self.seed, number);
        let count = connection.exchanges.len();
        let own = within(self.send_http1(number, way, connection)).await;
        (
            own + &self.all_received(way, number, count).await,
            count as u64,
        )
    }

    async fn send_http1(
        &self,
        number: u64,
        way: u16,
        connection: Connection,
    ) -> io::Result<String> {
        let (read, mut write) = self.connect(way).await?.into_split();
        let mut read = BufReader::new(read);
        let mut rng = rng(self.seed, number, 7);
        let mut transcript = String::new();
        if connection.pipelined {
            let bytes = connection
                .exchanges
                .iter()
                .flat_map(|one| [&one.request.head[..], &one.request.body]);
            let bytes = bytes.collect::<Vec<_>>().concat();
            let send = async {
                for piece in pieces(&mut rng, &bytes) {
                    write.write_all(piece).await?;
                }
                Ok::<_, io::Error>(())
            };
            let receive = async {
                for exchange in &connection.exchanges {
                    read_responses(&mut read, exchange, &self.omitted, &mut transcript).await?;
                }
                Ok::<_, io::Error>(())
            };
            tokio::try_join!(send, receive)?;
            return Ok(transcript);
        }
        for exchange in &connection.exchanges {
            let Message { head, body, .. } = &exchange.request;
            let whole = [&head[..], body].concat();
            let (first, rest) = whole.split_at(if exchange.expects {
                head.len()
            } else {
                whole.len()
            });
            for piece in pieces(&mut rng, first) {
                write.write_all(piece).await?;
            }
            if exchange.expects {
                let interim = read_lines(&mut read, Vec::new()).await?.unwrap_or_default();
                writeln!(transcript, "{}", interim.concat().escape_ascii())
                    .expect("a String has room");
                write.write_all(rest).await?;
            }
            read_responses(&mut read, exchange, &self.omitted, &mut transcript).await?;
            if exchange.upgrades {
                let script = Script::new(self.seed, number, 6);
                transcript += &script
                    .run(&mut join(&mut read, &mut write), true, 0)
                    .await?;
            }
        }
        Ok(transcript)
    }

    async fn http2(&self, number: u64, way: u16) -> (String, u64) {
        let exchanges = http2::exchanges(self.seed, number);
        let count = exchanges.len();
        let own = within(async {
            let stream = self.connect(way).await?;
            self.send_http2(stream, exchanges)
                .await
                .map_err(io::Error::other)
        });
        (
            own.await + &self.all_received(way, number, count).await,
            count as u64,
        )
    }

    async fn send_http2(
        &self,
        stream: TcpStream,
        exchanges: Vec<http2::Exchange>,
    ) -> Result<String, h2::Error> {
        let (mut sender, connection) = h2::client::handshake(stream).await?;
        let connection = spawn_local(connection);
        let mut streams = JoinSet::new();
        for (index, exchange) in exchanges.into_iter().enumerate() {
            sender = sender.ready().await?;
            let is_empty = exchange.request_body.is_empty();
            let (response, mut body) = sender.send_request(exchange.request, is_empty)?;
            let omitted = self.omitted.clone();
            streams.spawn_local(async move {
                if !is_empty {
                    exchange.request_body.send(&mut body).await?;
                }
                Ok::<_, h2::Error>((index, receive_http2(response, &omitted).await?))
            });
        }
        let mut transcripts = Vec::new();
        while let Some(stream) = streams.join_next().await {
            transcripts.push(stream.expect("the task does not panic")?);
        }
        connection.abort();
        transcripts.sort();
        Ok(transcripts
            .into_iter()
            .map(|(_, transcript)| transcript)
            .collect())
    }

    /// The messages of the exchanges of a connection that the server has received.
    async fn all_received(&self, way: u16, number: u64, count: usize) -> String {
        let mut all = String::new();
        for index in 0..count {
            let text = self.received(way, &format!("{number}.{index}")).await;
            all += &format!("the server received\n{text}");
        }
        all
    }

    async fn received(&self, way: u16, key: &str) -> String {
        within(async {
            let mut stream = self.connect(TRANSCRIPTS).await?;
            stream
                .write_all(format!("{way} {key}\n").as_bytes())
                .await?;
            let mut text = String::new();
            stream.read_to_string(&mut text).await?;
            Ok(text)
        })
        .await
    }
}

/// Reads the responses to one request: interim ones, and the final one.
async fn read_responses(
    read: &mut (impl AsyncBufRead + Unpin),
    exchange: &Exchange,
    omitted: &Omitted,
    transcript: &mut String,
) -> io::Result<()> {
    let method = String::from_utf8_lossy(&exchange.request.head);
    let method = method.split(' ').next();
    loop {
        let Some(lines) = read_lines(read, Vec::new()).await? else {
            return Err(io::Error::other("the connection ends before the response"));
        };
        let response = Received::head(lines);
        let is_interim = response.is_interim();
        *transcript += &response.read_body(read, method).await?.transcript(omitted);
        if !is_interim {
            return Ok(());
        }
    }
}

async fn receive_http2(
    mut response: ResponseFuture,
    omitted: &Omitted,
) -> Result<String, h2::Error> {
    let mut transcript = String::new();
    while let Some(interim) = poll_fn(|cx| response.poll_informational(cx)).await {
        transcript += &http2::interim(&interim?, omitted);
    }
    Ok(transcript + &http2::response(response.await?, omitted).await?)
}

/// The lines of two transcripts that differ, or all of them.
fn difference(direct: &str, mesh: &str, all: bool) -> String {
    let only = |sign: char, ours: &str, theirs: &str| {
        let others: Vec<&str> = theirs.lines().collect();
        let lines = ours.lines().filter(|line| !others.contains(line));
        lines
            .map(|line| format!("{sign} {line}\n"))
            .collect::<String>()
    };
    let lines = only('-', direct, mesh) + &only('+', mesh, direct);
    if lines.is_empty() || all {
        return format!("{lines}--- without the mesh:\n{direct}--- with the mesh:\n{mesh}");
    }
    lines
}

/// The result, or the error as its text.
async fn within(future: impl Future<Output = io::Result<String>>) -> String {
    match timeout(2 * TIMEOUT, future).await {
        Ok(Ok(text)) => text,
        Ok(Err(error)) => format!("error: {error}\n"),
        Err(_) => "timeout\n".to_owned(),
    }
}
