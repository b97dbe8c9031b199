//! TLS records: the proxy's own implementation (`proxy/src/secure/tls/record.rs`, `session.rs`) against
//! rustls, over loopback, without anything else of a proxy. The decision for our own records
//! (docs/decisions.md) depends on the ratios.
//!
//! The server is a child process, and the client a thread of the benchmark. Both use the same
//! implementation, and the CPU time of both counts.

mod streams;

use std::{
    env,
    io::{self, BufRead, BufReader},
    net::{Ipv4Addr, SocketAddr},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use base64::{Engine, prelude::BASE64_STANDARD};
use clap::ValueEnum;
use diy_mesh_proxy::secure::io::Io;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::Resumption,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
};
use tokio::{
    net::{TcpListener, TcpStream},
    task::{LocalSet, spawn_local},
};
use tokio_rustls::TlsStream;

use self::streams::{Stream, Unbuffered};
use crate::{
    cases::Metric,
    load::{self, Window},
    measure::Numbers,
    process::Meter,
};

const NAME: &str = "records";
const REQUEST: [u8; 128] = [b'r'; 128];
const RESPONSE: [u8; 1024] = [b's'; 1024];
const CONNECTIONS: usize = 32;
const IDLE_CONNECTIONS: usize = 1000;

/// An implementation of TLS records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Implementation {
    /// The proxy's.
    Own,
    /// tokio-rustls.
    TokioRustls,
    /// The unbuffered API of rustls.
    RustlsUnbuffered,
}

/// Results of one implementation.
#[derive(Debug)]
struct Cost {
    /// CPU time of both ends per request.
    request: Duration,
    /// CPU time of both ends per 10^9 bytes.
    gigabyte: Duration,
    /// Resident memory of the server for its idle connections.
    memory: u64,
}

/// Measures our own implementation and another one, and returns the ratios.
pub fn measure(other: Implementation, window: Window) -> Result<Numbers> {
    let [own, other] = [cost(Implementation::Own, window)?, cost(other, window)?];
    let ratio = |of: fn(&Cost) -> f64| of(&own) / of(&other);
    Ok(vec![
        (Metric::CpuRatio, ratio(|cost| cost.request.as_secs_f64())),
        (
            Metric::CpuPerGigabyteRatio,
            ratio(|cost| cost.gigabyte.as_secs_f64()),
        ),
        (Metric::MemoryRatio, ratio(|cost| cost.memory as f64)),
    ])
}

fn cost(implementation: Implementation, window: Window) -> Result<Cost> {
    match implementation {
        Implementation::Own => cost_of::<Io>(implementation, window),
        Implementation::TokioRustls => cost_of::<TlsStream<TcpStream>>(implementation, window),
        Implementation::RustlsUnbuffered => cost_of::<Unbuffered>(implementation, window),
    }
}

fn cost_of<S: Stream>(implementation: Implementation, window: Window) -> Result<Cost> {
    let server = Server::start(implementation)?;
    let meters = [server.meter(), Meter::of(std::process::id())];
    let cpu = || meters.iter().map(Meter::cpu).sum::<Result<Duration>>();
    let config = &server.client_config()?;
    let requests = load::run(server.requests, window, cpu, CONNECTIONS, |to, counter| {
        let config = config.clone();
        async move {
            let mut stream = connect::<S>(to, config).await?;
            loop {
                request(&mut stream).await?;
                counter.set(counter.get() + 1);
            }
        }
    })?;
    let bytes = load::run(server.sink, window, cpu, 1, |to, counter| {
        let config = config.clone();
        async move {
            let mut stream = connect::<S>(to, config).await?;
            let piece = vec![0xa5; 256 * 1024];
            loop {
                stream.write(&piece).await?;
                counter.set(counter.get() + piece.len() as u64);
            }
        }
    })?;
    let cost = Cost {
        request: (requests.after - requests.before).div_f64(requests.count as f64),
        gigabyte: (bytes.after - bytes.before).div_f64(bytes.count as f64 / 1e9),
        memory: Server::start(implementation)?.idle_memory::<S>()?,
    };
    eprintln!("  {implementation:?}: {cost:?}");
    Ok(cost)
}

async fn connect<S: Stream>(to: SocketAddr, config: Arc<ClientConfig>) -> Result<S> {
    let tcp = TcpStream::connect(to).await?;
    tcp.set_nodelay(true)?;
    Ok(S::connect(tcp, config).await?)
}

async fn request(stream: &mut impl Stream) -> Result<()> {
    stream.write(&REQUEST).await?;
    let mut received = 0;
    while received < RESPONSE.len() {
        let read = stream.read().await?;
        ensure!(read > 0, "the server closed the connection");
        received += read;
    }
    Ok(())
}

/// A server in a child process, which drop ends.
struct Server {
    child: Child,
    requests: SocketAddr,
    sink: SocketAddr,
    certificate: CertificateDer<'static>,
}

impl Server {
    fn start(implementation: Implementation) -> Result<Self> {
        let value = implementation
            .to_possible_value()
            .context("an implementation without a name")?;
        let mut child = Command::new(env::current_exe().context("find this program")?)
            .args(["--records-server", value.get_name()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("start a server of TLS records")?;
        let mut line = String::new();
        let output = child.stdout.take().context("the server has no output")?;
        BufReader::new(output)
            .read_line(&mut line)
            .context("read the addresses of the server")?;
        let [requests, sink, certificate] = line.split_whitespace().collect::<Vec<_>>()[..] else {
            anyhow::bail!("the server printed no addresses: {line:?}");
        };
        Ok(Self {
            child,
            requests: requests.parse()?,
            sink: sink.parse()?,
            certificate: BASE64_STANDARD.decode(certificate)?.into(),
        })
    }

    fn meter(&self) -> Meter {
        Meter::of(self.child.id())
    }

    fn client_config(&self) -> Result<Arc<ClientConfig>> {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone())?;
        let mut config =
            ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
                .with_protocol_versions(&[&rustls::version::TLS13])?
                .with_root_certificates(roots)
                .with_no_client_auth();
        config.enable_secret_extraction = true;
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }

    /// The memory of idle connections, after one request each.
    fn idle_memory<S: Stream>(&self) -> Result<u64> {
        let (config, meter) = (self.client_config()?, self.meter());
        load::runtime()?.block_on(async {
            let mut open = Vec::new();
            let mut memory = Vec::new();
            // One extra connection: the first figure includes one-time allocations.
            for count in [1, IDLE_CONNECTIONS] {
                for _ in 0..count {
                    let mut stream = connect::<S>(self.requests, config.clone()).await?;
                    request(&mut stream).await?;
                    open.push(stream);
                }
                memory.push(meter.resident()?);
            }
            Ok(memory[1].saturating_sub(memory[0]))
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the server of an implementation until the process is killed.
pub fn serve(implementation: Implementation) -> Result<()> {
    match implementation {
        Implementation::Own => serve_with::<Io>(),
        Implementation::TokioRustls => serve_with::<TlsStream<TcpStream>>(),
        Implementation::RustlsUnbuffered => serve_with::<Unbuffered>(),
    }
}

fn serve_with<S: Stream>() -> Result<()> {
    let certified = rcgen::generate_simple_self_signed([NAME.to_owned()])?;
    let certificate = certified.cert.der().clone();
    let key = PrivatePkcs8KeyDer::from(certified.signing_key.serialize_der());
    let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], PrivateKeyDer::Pkcs8(key))?;
    config.enable_secret_extraction = true;
    config.send_tls13_tickets = 0;
    let config = Arc::new(config);
    LocalSet::new().block_on(&load::runtime()?, async {
        let requests = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let sink = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let certificate = BASE64_STANDARD.encode(&certificate);
        println!(
            "{} {} {certificate}",
            requests.local_addr()?,
            sink.local_addr()?
        );
        loop {
            let (tcp, replies) = tokio::select! {
                accepted = requests.accept() => (accepted?.0, true),
                accepted = sink.accept() => (accepted?.0, false),
            };
            tcp.set_nodelay(true)?;
            let config = config.clone();
            spawn_local(async move {
                // A failed connection fails the measurement at the client.
                let _ = carry::<S>(tcp, config, replies).await;
            });
        }
    })
}

async fn carry<S: Stream>(
    tcp: TcpStream,
    config: Arc<ServerConfig>,
    replies: bool,
) -> io::Result<()> {
    let mut stream = S::accept(tcp, config).await?;
    let mut received = 0;
    loop {
        match stream.read().await? {
            0 => return Ok(()),
            read => received += read,
        }
        while replies && received >= REQUEST.len() {
            received -= REQUEST.len();
            stream.write(&RESPONSE).await?;
        }
    }
}

fn server_name() -> ServerName<'static> {
    ServerName::try_from(NAME).expect("a valid DNS name")
}
