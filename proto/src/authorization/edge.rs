//! Edges: kinds of calls to a pod, as its proxy reports them. Pure.

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr as _;

use diy_mesh_model::identity::Identity;

use super::fields::is_name;
use super::paths::PathPattern;
use super::readings::{Reading, Readings, is_common, is_plain, is_readable};
use crate::mesh::v1 as proto;
use proto::authorized_path::Kind;
use proto::edge::Path;

/// The length of the identity of a caller, and of a path.
const MAX_CALLER_BYTES: usize = 512;
const MAX_PATH_BYTES: usize = 256;
/// The methods of RFC 9110 and RFC 5789.
const METHODS: [&str; 9] = [
    "GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH",
];
/// All other methods.
pub const OTHER_METHOD: &str = "OTHER";

/// The method of an edge.
pub fn method(sent: &[u8]) -> &'static str {
    let known = METHODS.iter().find(|method| method.as_bytes() == sent);
    known.unwrap_or(&OTHER_METHOD)
}

/// The path of a request up to the end of its first element, or `None` if servers may read another
/// element.
pub fn segment(path: &[u8]) -> Option<&str> {
    if path == b"*" {
        return Some("*");
    }
    let first = first_element(path)?;
    if is_common(path) || is_plain(path) && is_readable(path) {
        return Some(first);
    }
    let readings = Readings::of(path, false);
    let mut others = readings.known()?;
    others
        .all(|reading| first_element(&reading.path) == Some(first))
        .then_some(first)
}

fn first_element(path: &[u8]) -> Option<&str> {
    let rest = path.strip_prefix(b"/")?;
    let end = rest.iter().position(|byte| *byte == b'/');
    str::from_utf8(&path[..=end.unwrap_or(rest.len())]).ok()
}

/// The path of a gRPC call, or `None` if it does not consist of a service and a method.
pub fn grpc_path(path: &[u8]) -> Option<&str> {
    let path = str::from_utf8(path).ok()?;
    is_grpc_path(path).then_some(path)
}

fn is_grpc_path(path: &str) -> bool {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let is_element = |name: &str| !name.is_empty() && name.bytes().all(is_name);
    let elements = path.strip_prefix('/').and_then(|rest| rest.split_once('/'));
    path.len() <= MAX_PATH_BYTES
        && elements.is_some_and(|(service, method)| is_element(service) && is_element(method))
}

/// The host and the port of a destination outside of the cluster.
pub fn destination(text: &str) -> Option<(&str, u16)> {
    if let Ok(address) = SocketAddr::from_str(text) {
        let host = text.rsplit_once(':')?.0;
        return Some((host, address.port())).filter(|(_, port)| *port > 0);
    }
    let (host, port) = text.rsplit_once(':')?;
    let is_name = host.len() <= MAX_PATH_BYTES && is_name(host.as_bytes());
    let is_lower = !host.bytes().any(|byte| byte.is_ascii_uppercase());
    let port = port.parse().ok().filter(|port| *port > 0)?;
    (is_name && is_lower).then_some((host, port))
}

/// The block of the address of a client without an identity.
pub fn block(address: IpAddr) -> String {
    let [first, _] = ends(address);
    let length = if first.is_ipv4() { 24 } else { 64 };
    format!("{first}/{length}")
}

/// The first and the last address of the block of an edge. `None`: it is none that [`block`] gives.
pub fn ends_of_block(text: &str) -> Option<[IpAddr; 2]> {
    let address: IpAddr = text.split_once('/')?.0.parse().ok()?;
    (block(address) == text).then(|| ends(address))
}

fn ends(address: IpAddr) -> [IpAddr; 2] {
    match address.to_canonical() {
        IpAddr::V4(address) => {
            let others = u32::from(u8::MAX);
            let bits = u32::from(address);
            [bits & !others, bits | others].map(|bits| Ipv4Addr::from(bits).into())
        }
        IpAddr::V6(address) => {
            let others = u128::from(u64::MAX);
            let bits = u128::from(address);
            [bits & !others, bits | others].map(|bits| Ipv6Addr::from(bits).into())
        }
    }
}

/// The edge of connections on which clients have sent bytes in place of none.
pub fn connection(silent: &proto::SilentConnection) -> proto::Edge {
    proto::Edge {
        caller: silent.caller.clone(),
        port: silent.port,
        block: silent.block.clone(),
        ..proto::Edge::default()
    }
}

/// Whether an edge is one that a proxy of this release reports.
pub fn is_valid(edge: &proto::Edge) -> bool {
    if let Some(silent) = &edge.silent {
        let only = proto::Edge {
            silent: edge.silent.clone(),
            ..proto::Edge::default()
        };
        return *edge == only && is_valid(&connection(silent));
    }
    if !edge.destination.is_empty() {
        let only = proto::Edge {
            destination: edge.destination.clone(),
            ..proto::Edge::default()
        };
        return *edge == only && destination(&edge.destination).is_some();
    }
    let is_http = METHODS.contains(&&*edge.method) || edge.method == OTHER_METHOD;
    let is_caller = edge.caller.len() <= MAX_CALLER_BYTES
        && (edge.caller.is_empty() || Identity::from_str(&edge.caller).is_ok());
    let is_path = match &edge.path {
        None => is_http || edge.method.is_empty(),
        Some(Path::Pattern(pattern)) => is_http && PathPattern::parse(pattern).is_ok(),
        Some(Path::Segment(text)) => {
            is_http && text.len() <= MAX_PATH_BYTES && segment(text.as_bytes()) == Some(text)
        }
        Some(Path::Grpc(path)) => is_http && is_grpc_path(path),
    };
    let is_block = edge.block.is_empty()
        || edge.caller.is_empty() && edge.method.is_empty() && ends_of_block(&edge.block).is_some();
    (1..=u32::from(u16::MAX)).contains(&edge.port) && is_caller && is_path && is_block
}

/// The patterns of paths in policies, the most specific ones first.
#[derive(Debug, Default)]
pub(super) struct Patterns(Vec<Pattern>);

#[derive(Debug)]
struct Pattern {
    /// Empty: all.
    ports: [Vec<u32>; 2],
    element: u64,
    pattern: PathPattern,
    message: proto::AuthorizedPath,
}

impl Patterns {
    pub(super) fn compile(message: &proto::Authorization) -> Patterns {
        let mut all = Vec::new();
        for policy in &message.policies {
            for rule in &policy.rules {
                let ports = [policy.ports.clone(), rule.ports.clone()];
                let paths = rule.requests.iter().flat_map(|request| &request.paths);
                let paths = paths.filter(|path| !is_any(path));
                all.extend(paths.filter_map(|path| Pattern::parse(path, ports.clone())));
            }
        }
        all.sort_by_cached_key(|one| one.precedence());
        Patterns(all)
    }

    /// The first pattern that all readings of the path match.
    pub(super) fn find(&self, port: u16, path: &[u8]) -> Option<&proto::AuthorizedPath> {
        if self.0.is_empty() {
            return None;
        }
        let readings = Readings::of(path, false);
        let known = readings.known()?;
        let matches = |one: &&Pattern| {
            let is_match = |reading: &Reading<'_>| one.pattern.matches(reading, true);
            readings.may_have(one.element) && one.is_at(port) && known.clone().all(is_match)
        };
        self.0.iter().find(matches).map(|one| &one.message)
    }
}

/// Whether every path matches: the pattern tells nothing.
fn is_any(path: &proto::AuthorizedPath) -> bool {
    matches!(&path.kind, Some(Kind::Prefix(prefix)) if prefix.bytes().all(|byte| byte == b'/'))
}

impl Pattern {
    fn parse(message: &proto::AuthorizedPath, ports: [Vec<u32>; 2]) -> Option<Pattern> {
        let pattern = PathPattern::parse(message).ok()?;
        Some(Pattern {
            ports,
            element: pattern.element(),
            pattern,
            message: message.clone(),
        })
    }

    fn is_at(&self, port: u16) -> bool {
        let mut ports = self.ports.iter();
        ports.all(|list| list.is_empty() || list.contains(&port.into()))
    }

    /// Ascending for less specific patterns.
    fn precedence(&self) -> (u8, Reverse<usize>, String) {
        let (rank, text) = match &self.message.kind {
            Some(Kind::Exact(text)) => (0, text),
            Some(Kind::Template(text)) if !text.ends_with("{**}") => (1, text),
            Some(Kind::Template(text) | Kind::Prefix(text)) => (2, text),
            Some(Kind::Suffix(text)) => (3, text),
            None => return (4, Reverse(0), String::new()),
        };
        (rank, Reverse(text.len()), text.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authorization::Authorization;

    #[test]
    fn segment_is_one_that_every_server_reads() {
        for (path, expected) in [
            ("/", Some("/")),
            ("/shop", Some("/shop")),
            ("/shop/", Some("/shop")),
            ("/shop/../admin", None),
            ("/shop/%2e%2e/admin", None),
            ("/shop/..;/admin", None),
            ("//shop/a", None),
            ("/sh%6fp/a", None),
            ("/api/v4/projects/a%2Fb", Some("/api")),
            ("/shop//a", Some("/shop")),
            ("*", Some("*")),
            ("", None),
            ("shop", None),
        ] {
            assert_eq!(segment(path.as_bytes()), expected, "{path}");
        }
        assert_eq!(segment(b"/\xff/a"), None);
    }

    #[test]
    fn common_paths_are_plain_and_readable() {
        let bytes = b"/./a-_~%;\\?#\x00 \xff";
        let all = 0..bytes.len().pow(4);
        let paths = all.map(|number| {
            let digits = (0..4).map(|digit| number / bytes.len().pow(digit) % bytes.len());
            digits.map(|digit| bytes[digit]).collect::<Vec<u8>>()
        });
        let mut count = 0;
        for path in paths.filter(|path| is_common(path)) {
            assert!(is_plain(&path) && is_readable(&path), "{path:?}");
            count += 1;
        }
        assert!(count > 100, "{count}");
        assert!(is_common(b"/a.b/~c-d_0") && !is_common(b"/a/.b") && !is_common(b"a"));
    }

    #[test]
    fn edges_to_outside_have_a_host_and_a_port_and_nothing_else() {
        assert_eq!(
            destination("api.example.com:443"),
            Some(("api.example.com", 443))
        );
        assert_eq!(destination("192.0.2.7:80"), Some(("192.0.2.7", 80)));
        assert_eq!(destination("[2001:db8::7]:80"), Some(("[2001:db8::7]", 80)));
        for wrong in [
            "",
            "api.example.com",
            "API.example.com:1",
            "a:0",
            "192.0.2.7:0",
            "a b:1",
        ] {
            assert_eq!(destination(wrong), None, "{wrong}");
        }
        let outside = proto::Edge {
            destination: "api.example.com:443".into(),
            ..proto::Edge::default()
        };
        assert!(is_valid(&outside));
        assert!(!is_valid(&proto::Edge {
            port: 443,
            ..outside
        }));
    }

    #[test]
    fn blocks_of_clients_are_the_addresses_of_a_network() {
        let block_of = |text: &str| block(text.parse().expect("an address"));
        assert_eq!(block_of("192.0.2.77"), "192.0.2.0/24");
        assert_eq!(block_of("::ffff:192.0.2.77"), "192.0.2.0/24");
        assert_eq!(block_of("2001:db8:0:1:2::7"), "2001:db8:0:1::/64");
        let ends = ends_of_block("192.0.2.0/24").map(|ends| ends.map(|one| one.to_string()));
        assert_eq!(ends, Some(["192.0.2.0", "192.0.2.255"].map(String::from)));
        for wrong in [
            "",
            "192.0.2.1/24",
            "192.0.2.0/16",
            "192.0.2.0",
            "::ffff:192.0.2.0/64",
        ] {
            assert_eq!(ends_of_block(wrong), None, "{wrong}");
        }
        let mut edge = proto::Edge {
            port: 6379,
            block: "192.0.2.1/24".into(),
            ..proto::Edge::default()
        };
        assert!(!is_valid(&edge));
        edge.block = "192.0.2.0/24".into();
        edge.caller = "spiffe://cluster.local/ns/shop/sa/web".into();
        assert!(!is_valid(&edge));
    }

    #[test]
    fn methods_of_the_registry_are_told_apart() {
        assert_eq!((method(b"GET"), method(b"PATCH")), ("GET", "PATCH"));
        assert_eq!((method(b"get"), method(b"BREW")), ("OTHER", "OTHER"));
    }

    fn path(kind: Kind) -> proto::AuthorizedPath {
        proto::AuthorizedPath { kind: Some(kind) }
    }

    #[test]
    fn invalid_edges_are_recognized() {
        let valid = proto::Edge {
            caller: "spiffe://cluster.local/ns/shop/sa/web".into(),
            port: 8080,
            method: "GET".into(),
            path: Some(Path::Segment("/shop".into())),
            ..proto::Edge::default()
        };
        assert!(is_valid(&valid));
        let silent = |port, block: &str| proto::Edge {
            silent: Some(proto::SilentConnection {
                port,
                block: block.to_owned(),
                ..proto::SilentConnection::default()
            }),
            ..proto::Edge::default()
        };
        assert!(is_valid(&silent(80, "192.0.2.0/24")));
        assert!(!is_valid(&silent(0, "192.0.2.0/24")));
        assert!(!is_valid(&silent(80, "192.0.2.1/24")));
        let port = 80;
        assert!(!is_valid(&proto::Edge {
            port,
            ..silent(80, "")
        }));
        assert!(is_valid(&proto::Edge {
            port: 6379,
            block: "192.0.2.0/24".into(),
            ..proto::Edge::default()
        }));
        let invalid: [fn(&mut proto::Edge); 11] = [
            |edge| edge.block = "192.0.2.0/24".into(),
            |edge| edge.port = 0,
            |edge| edge.port = 70_000,
            |edge| edge.caller = "web".into(),
            |edge| edge.caller = format!("spiffe://cluster.local/ns/shop/sa/{}", "x".repeat(500)),
            |edge| edge.method = "get".into(),
            |edge| edge.method = String::new(),
            |edge| edge.path = Some(Path::Segment("/shop/a".into())),
            |edge| edge.path = Some(Path::Segment(format!("/{}", "x".repeat(256)))),
            |edge| edge.path = Some(Path::Grpc("/echo.Echo/a/b".into())),
            |edge| edge.path = Some(Path::Pattern(path(Kind::Exact("a".into())))),
        ];
        for (number, change) in invalid.into_iter().enumerate() {
            let mut edge = valid.clone();
            change(&mut edge);
            assert!(!is_valid(&edge), "{number}: {edge:?}");
        }
        assert_eq!(grpc_path(b"/echo.Echo/Say"), Some("/echo.Echo/Say"));
        let others = ["/echo.Echo", "/echo.Echo/", "/a b/c", "/a/b?c", "a/b"];
        let divided = [
            "",
            "/",
            "//",
            "//b",
            "/a//b",
            "/a/b/",
            "/a/b/c",
            "//a/b",
            "/a/\u{e9}",
        ];
        for other in others.iter().chain(&divided) {
            assert_eq!(grpc_path(other.as_bytes()), None, "{other}");
        }
        for invalid in [
            &b"/a/\xff"[..],
            b"/a/b\0",
            format!("/a/{}", "b".repeat(254)).as_bytes(),
        ] {
            assert_eq!(grpc_path(invalid), None, "{invalid:?}");
        }
    }

    #[test]
    fn most_specific_pattern_of_the_port_is_found() {
        let kinds = [
            Kind::Suffix(".html".into()),
            Kind::Prefix("/".into()),
            Kind::Prefix("/shop".into()),
            Kind::Template("/shop/{*}".into()),
            Kind::Exact("/shop/cart".into()),
        ];
        let request = proto::RequestMatch {
            paths: kinds.map(path).into(),
            ..proto::RequestMatch::default()
        };
        let rule = proto::AuthorizationRule {
            revision: 1,
            ports: vec![8080],
            requests: vec![request],
            ..proto::AuthorizationRule::default()
        };
        let policy = proto::AuthorizationPolicy {
            audit: true,
            rules: vec![rule],
            ..proto::AuthorizationPolicy::default()
        };
        let policies = Authorization::compile(&proto::Authorization {
            policies: vec![policy],
            ..proto::Authorization::default()
        });
        let find = |port, path: &str| policies.pattern(port, path.as_bytes())?.kind.clone();
        for (path, expected) in [
            ("/shop/cart", Some(Kind::Exact("/shop/cart".into()))),
            ("/shop/item", Some(Kind::Template("/shop/{*}".into()))),
            ("/shop/a/b", Some(Kind::Prefix("/shop".into()))),
            ("/index.html", Some(Kind::Suffix(".html".into()))),
            ("/shop/../admin", None),
            ("/admin", None),
        ] {
            assert_eq!(find(8080, path), expected, "{path}");
        }
        assert_eq!(find(9090, "/shop/cart"), None);
    }
}
