//! Names of destinations, resolved with DNS (RFC 1035) by the servers of the pod. Neither `/etc/hosts`
//! nor search domains count: an application may be able to write the former, and a policy names hosts
//! in full.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use domain::base::{Message, Name, Rtype};
use domain::rdata::{A, Aaaa};
use domain::resolv::StubResolver;
use domain::resolv::stub::conf::ResolvConf;
use tokio::sync::OnceCell;
use tokio::time::{Instant, timeout};

/// Names of a worker whose addresses are kept. Those above it are resolved for each call.
const MAX_NAMES: usize = 256;
/// Addresses of a name that count.
const MAX_ADDRESSES: usize = 64;
/// How long addresses are kept, whatever their TTL is.
const TTL: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// The time for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A name, and whether its addresses are of IPv6.
type Key = (Box<str>, bool);

/// The resolver of a worker.
pub struct Resolver {
    stub: StubResolver,
    has_servers: bool,
    entries: RefCell<HashMap<Key, Rc<OnceCell<Answer>>>>,
}

/// Concurrent calls wait for the same one.
#[derive(Debug)]
struct Answer {
    addresses: Vec<IpAddr>,
    expires: Instant,
}

impl Resolver {
    /// A resolver that asks the name servers in a file such as `/etc/resolv.conf`, which is read once.
    pub fn new(file: &Path) -> Self {
        let mut conf = ResolvConf::new();
        if let Err(error) = conf.parse_file(file) {
            tracing::warn!(
                "{}: {error}: no names are resolved for egress",
                file.display()
            );
            conf.servers.clear();
        }
        Self {
            has_servers: !conf.servers.is_empty(),
            stub: StubResolver::from_conf(conf),
            entries: RefCell::default(),
        }
    }

    /// A resolver that asks this server, for tests.
    #[cfg(test)]
    pub(crate) fn of(server: std::net::SocketAddr) -> Self {
        use domain::resolv::stub::conf::{ServerConf, Transport};
        let mut conf = ResolvConf::new();
        conf.servers = vec![ServerConf::new(server, Transport::UdpTcp)];
        Self {
            has_servers: true,
            stub: StubResolver::from_conf(conf),
            entries: RefCell::default(),
        }
    }

    /// Whether a name would be kept, for tests.
    #[cfg(test)]
    pub(crate) fn keeps(&self, name: &str) -> bool {
        let _entry = self.entry(name, false);
        self.entries.borrow().contains_key(&(name.into(), false))
    }

    /// The addresses of a name, of one family. Empty for a name that does not exist.
    pub async fn resolve(&self, name: &str, ipv6: bool) -> Result<Vec<IpAddr>, String> {
        let entry = self.entry(name, ipv6);
        let answer = entry.get_or_try_init(|| self.query(name, ipv6)).await?;
        Ok(answer.addresses.clone())
    }

    fn entry(&self, name: &str, ipv6: bool) -> Rc<OnceCell<Answer>> {
        let (mut entries, now) = (self.entries.borrow_mut(), Instant::now());
        let key = (name.into(), ipv6);
        // One without an answer is of use only while a call waits for it.
        let is_of_use = |entry: &Rc<OnceCell<Answer>>| match entry.get() {
            Some(answer) => answer.expires > now,
            None => Rc::strong_count(entry) > 1,
        };
        if let Some(entry) = entries.get(&key).filter(|entry| is_of_use(entry)) {
            return entry.clone();
        }
        if entries.len() >= MAX_NAMES {
            entries.retain(|_, entry| is_of_use(entry));
        }
        let entry = Rc::new(OnceCell::new());
        if entries.len() < MAX_NAMES || entries.contains_key(&key) {
            entries.insert(key, entry.clone());
        }
        entry
    }

    async fn query(&self, name: &str, ipv6: bool) -> Result<Answer, String> {
        if !self.has_servers {
            return Err("the pod has no name servers".to_owned());
        }
        let question: Name<Vec<u8>> = name.parse().map_err(|error| format!("{error}"))?;
        let kind = if ipv6 { Rtype::AAAA } else { Rtype::A };
        let answered = timeout(TIMEOUT, self.stub.query((question, kind))).await;
        let answer = answered.map_err(|_| "no answer in time".to_owned())?;
        let answer = answer.map_err(|error| error.to_string())?;
        if !answer.is_final() {
            return Err(format!("the answer is {}", answer.header().rcode()));
        }
        read(&answer.into_message()).ok_or_else(|| "the answer is malformed".to_owned())
    }
}

/// The addresses in a message, of the name at the end of its aliases.
fn read(message: &Message<impl AsRef<[u8]>>) -> Option<Answer> {
    let message = message.for_slice();
    let owner = message.canonical_name()?;
    let (mut addresses, mut ttl) = (Vec::new(), TTL.1);
    for record in message.answer().ok()? {
        let record = record.ok()?;
        ttl = ttl.min(Duration::from_secs(record.ttl().as_secs().into()));
        if record.owner() != owner {
            continue;
        }
        let v4 = record.to_record::<A>().ok()?;
        let v6 = record.to_record::<Aaaa>().ok()?;
        addresses.extend(v4.map(|record| IpAddr::from(record.data().addr())));
        addresses.extend(v6.map(|record| IpAddr::from(record.data().addr())));
    }
    addresses.truncate(MAX_ADDRESSES);
    if addresses.is_empty() {
        // The name may get one.
        ttl = TTL.0;
    }
    Some(Answer {
        addresses,
        expires: Instant::now() + ttl.max(TTL.0),
    })
}
