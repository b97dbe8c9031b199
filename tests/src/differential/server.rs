//! The raw server: records what it receives of each exchange, and responds as the exchange says.

use std::collections::HashMap;
use std::io;
use std::rc::Rc;

use bytes::Bytes;
use h2::server::SendResponse;
use http::Request;
use tokio::io::{
    AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, join,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::spawn_local;
use tokio::time::timeout;

use super::http1::{Connection, Exchange, Received, read_lines};
use super::opaque::Script;
use super::{
    DIRECT, KEY, MESH, OPAQUE, Omitted, SERVER_FIRST, TIMEOUT, TRANSCRIPTS, big_endian, http2,
    pieces, rng,
};

/// The state that the connections share.
struct Server {
    seed: u64,
    omitted: Omitted,
    /// The transcripts by the port and the key of the exchange.
    transcripts: watch::Sender<HashMap<String, String>>,
}

/// Serves until the process ends.
pub async fn serve(seed: u64, omitted: Omitted) -> io::Result<()> {
    let (transcripts, _) = watch::channel(HashMap::new());
    let server = Rc::new(Server {
        seed,
        omitted,
        transcripts,
    });
    for way in [MESH, DIRECT] {
        let listener = TcpListener::bind(("::", way)).await?;
        let silent = TcpListener::bind(("::", way + SERVER_FIRST)).await?;
        spawn_local(server.clone().accept(listener, way));
        spawn_local(server.clone().accept_silent(silent, way));
    }
    let listener = TcpListener::bind(("::", TRANSCRIPTS)).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        let server = server.clone();
        spawn_local(async move { server.answer(stream).await });
    }
}

impl Server {
    async fn accept(self: Rc<Self>, listener: TcpListener, way: u16) {
        while let Ok((stream, _)) = listener.accept().await {
            let server = self.clone();
            spawn_local(async move {
                if let Err(error) = server.connection(stream, way).await {
                    println!("connection at {way}: {error}");
                }
            });
        }
    }

    /// Clients at this port wait for the server.
    async fn accept_silent(self: Rc<Self>, listener: TcpListener, way: u16) {
        let mut number = 0;
        while let Ok((mut stream, _)) = listener.accept().await {
            number += 1;
            let server = self.clone();
            spawn_local(async move {
                let script = Script::numbered(server.seed, number, 4);
                let transcript = script.run(&mut stream, true, 0).await;
                server.record(way, format!("first-{number}"), transcript);
            });
        }
    }

    /// Sends a transcript as soon as it is there. The client asks with a line that is its key.
    async fn answer(&self, mut stream: TcpStream) -> io::Result<()> {
        let (read, mut write) = stream.split();
        let mut key = String::new();
        BufReader::new(read).read_line(&mut key).await?;
        let mut transcripts = self.transcripts.subscribe();
        let is_there = |all: &HashMap<String, String>| all.contains_key(key.trim_end());
        if timeout(TIMEOUT, transcripts.wait_for(is_there))
            .await
            .is_err()
        {
            return write.write_all(b"nothing has arrived\n").await;
        }
        let mut transcript = None;
        self.transcripts.send_if_modified(|all| {
            transcript = all.remove(key.trim_end());
            false
        });
        let transcript = transcript.unwrap_or_default();
        write.write_all(transcript.as_bytes()).await
    }

    fn record(&self, way: u16, key: String, transcript: io::Result<String>) {
        let transcript = transcript.unwrap_or_else(|error| format!("error: {error}\n"));
        self.transcripts.send_modify(|all| {
            // The same exchange again is a difference.
            all.entry(format!("{way} {key}"))
                .or_default()
                .push_str(&transcript);
        });
    }

    async fn connection(&self, stream: TcpStream, way: u16) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut first = [0];
        if stream.peek(&mut first).await? == 0 {
            return Ok(());
        }
        if first == [OPAQUE] {
            return self.opaque(stream, way).await;
        }
        let (read, mut write) = stream.into_split();
        let mut read = BufReader::new(read);
        let mut line = Vec::new();
        read.read_until(b'\n', &mut line).await?;
        if line.starts_with(b"PRI ") {
            let read = BufReader::new(io::Cursor::new(line).chain(read));
            return self
                .http2(join(read, write), way)
                .await
                .map_err(io::Error::other);
        }
        while let Some(lines) = read_lines(&mut read, std::mem::take(&mut line)).await? {
            if !self.http1(lines, &mut read, &mut write, way).await? {
                break;
            }
        }
        write.shutdown().await
    }

    async fn opaque(&self, mut stream: TcpStream, way: u16) -> io::Result<()> {
        let mut mark = [0; 9];
        stream.read_exact(&mut mark).await?;
        let number = big_endian(&mark[1..]);
        let script = Script::numbered(self.seed, number, 3);
        let transcript = script.run(&mut stream, false, mark.len()).await;
        self.record(way, format!("{number}"), transcript);
        Ok(())
    }

    /// Serves a request with this head. Returns whether the connection persists.
    async fn http1(
        &self,
        lines: Vec<Vec<u8>>,
        read: &mut (impl AsyncBufRead + Unpin),
        write: &mut (impl AsyncWrite + Unpin),
        way: u16,
    ) -> io::Result<bool> {
        let head = Received::head(lines);
        let Some((number, index)) = head.field(KEY).as_deref().and_then(numbers) else {
            return Err(io::Error::other("a request has no key"));
        };
        let mut connection = Connection::new(self.seed, number);
        let exchange = connection.exchanges.swap_remove(index);
        if exchange.expects {
            write.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        let request = head.read_body(read, None).await;
        let mut transcript = request
            .as_ref()
            .map(|request| request.transcript(&self.omitted));
        let mut rng = rng(self.seed, number, 5);
        let Exchange {
            interim, response, ..
        } = &exchange;
        for message in interim.iter().chain([response]) {
            for piece in pieces(&mut rng, &[&message.head[..], &message.body].concat()) {
                write.write_all(piece).await?;
            }
        }
        let tunnel = if exchange.upgrades {
            let script = Script::new(self.seed, number, 6);
            Some(script.run(&mut join(read, write), false, 0).await?)
        } else {
            None
        };
        if let (Ok(transcript), Some(tunnel)) = (&mut transcript, tunnel) {
            *transcript += &tunnel;
        }
        let transcript = transcript.map_err(|error| io::Error::other(error.to_string()));
        self.record(way, format!("{number}.{index}"), transcript);
        Ok(!exchange.response.closes && !exchange.upgrades)
    }

    async fn http2(
        &self,
        stream: impl tokio::io::AsyncRead + AsyncWrite + Unpin,
        way: u16,
    ) -> Result<(), h2::Error> {
        let mut connection = h2::server::handshake(stream).await?;
        let (sender, mut transcripts) = tokio::sync::mpsc::unbounded_channel();
        loop {
            let accepted = tokio::select! {
                accepted = connection.accept() => accepted,
                Some((key, transcript)) = transcripts.recv() => {
                    self.record(way, key, Ok(transcript));
                    continue;
                }
            };
            let Some(accepted) = accepted else { break };
            let (request, respond) = accepted?;
            let (seed, omitted, sender) = (self.seed, self.omitted.clone(), sender.clone());
            spawn_local(async move {
                let key = request.headers().get(KEY).and_then(|key| key.to_str().ok());
                let key = key.unwrap_or_default().to_owned();
                let transcript = serve_stream(seed, &key, request, respond, &omitted).await;
                let transcript = transcript.unwrap_or_else(|error| format!("error: {error}\n"));
                let _ = sender.send((key, transcript));
            });
        }
        Ok(())
    }
}

async fn serve_stream(
    seed: u64,
    key: &str,
    request: Request<h2::RecvStream>,
    mut respond: SendResponse<Bytes>,
    omitted: &Omitted,
) -> Result<String, h2::Error> {
    let (number, index) = numbers(key).ok_or(h2::Reason::PROTOCOL_ERROR)?;
    let exchange = http2::exchanges(seed, number).swap_remove(index);
    let transcript = http2::request(request, omitted).await?;
    for interim in exchange.interim {
        respond.send_informational(interim)?;
    }
    let is_empty = exchange.response_body.is_empty();
    let mut stream = respond.send_response(exchange.response, is_empty)?;
    if !is_empty {
        exchange.response_body.send(&mut stream).await?;
    }
    Ok(transcript)
}

/// The number of a connection and the index of an exchange on it.
fn numbers(key: &str) -> Option<(u64, usize)> {
    let (number, index) = key.split_once('.')?;
    Some((number.parse().ok()?, index.parse().ok()?))
}
