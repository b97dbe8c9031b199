//! The resolvers of the pod: the nameservers in its resolv.conf, which the kubelet writes once for
//! all containers.

use std::io;
use std::net::IpAddr;

use thiserror::Error;

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Kubernetes allows three, and C libraries use no more.
const MAX_RESOLVERS: usize = 8;

/// Why the resolvers are unknown.
#[derive(Debug, Error)]
pub enum Error {
    /// The file could not be read.
    #[error("cannot read {RESOLV_CONF}: {0}")]
    Unreadable(#[from] io::Error),
    /// A nameserver, and its line.
    #[error("line {0} of {RESOLV_CONF}: nameserver {1:?}, expected an IP address")]
    Invalid(usize, String),
    /// The number of nameservers.
    #[error("{RESOLV_CONF} has {0} nameservers, expected at most {MAX_RESOLVERS}")]
    TooMany(usize),
}

/// The resolvers of this pod.
pub fn read() -> Result<Vec<IpAddr>, Error> {
    parse(&String::from_utf8_lossy(&std::fs::read(RESOLV_CONF)?))
}

/// The nameservers in a resolv.conf. Without any, applications ask a resolver on loopback.
fn parse(text: &str) -> Result<Vec<IpAddr>, Error> {
    let mut resolvers = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let mut words = line.split_whitespace();
        if words.next() != Some("nameserver") {
            continue;
        }
        let word = words.next().unwrap_or_default();
        // Rules match an address on any interface: fe80::1%eth0.
        let address = word.split('%').next().unwrap_or_default();
        let address: Result<IpAddr, _> = address.parse();
        let address = address.map_err(|_| Error::Invalid(number, word.into()))?;
        // Packets to ::ffff:10.0.0.1 are IPv4.
        resolvers.push(address.to_canonical());
    }
    if resolvers.len() > MAX_RESOLVERS {
        return Err(Error::TooMany(resolvers.len()));
    }
    Ok(resolvers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<String>, String> {
        let resolvers = parse(text).map_err(|error| error.to_string())?;
        Ok(resolvers.iter().map(IpAddr::to_string).collect())
    }

    #[test]
    fn reads_nameservers_of_both_families() {
        let text = "# nameserver 1.1.1.1\n; nameserver 1.1.1.2\nsearch shop.svc.cluster.local nameserver\n\
                    nameserver 10.96.0.10\nnameserver\tfd00::a # cluster\noptions ndots:5\r\n\
                    nameserver fe80::1%eth0\r\nnameserver ::ffff:10.0.0.1\nnameservers 1.1.1.3";
        let expected = ["10.96.0.10", "fd00::a", "fe80::1", "10.0.0.1"];
        assert_eq!(parsed(text), Ok(expected.map(str::to_owned).to_vec()));
        assert_eq!(parsed(""), Ok(vec![]));
    }

    #[test]
    fn rejects_nameservers_that_are_no_addresses() {
        for word in [
            "dns.example.com",
            "10.96.0",
            "10.0.0.1:53",
            "[fd00::a]",
            "%eth0",
        ] {
            let expected =
                format!("line 2 of /etc/resolv.conf: nameserver {word:?}, expected an IP address");
            let text = format!("nameserver 10.96.0.10\nnameserver {word}\n");
            assert_eq!(parsed(&text), Err(expected));
        }
        let none = "line 1 of /etc/resolv.conf: nameserver \"\", expected an IP address";
        assert_eq!(parsed("nameserver"), Err(none.into()));
    }

    #[test]
    fn rejects_more_than_eight_nameservers() {
        assert_eq!(
            parsed(&"nameserver 10.0.0.1\n".repeat(8)).map(|all| all.len()),
            Ok(8)
        );
        let expected = "/etc/resolv.conf has 9 nameservers, expected at most 8";
        assert_eq!(
            parsed(&"nameserver 10.0.0.1\n".repeat(9)),
            Err(expected.into())
        );
    }
}
