//! Tests of hosts outside of the cluster as backends of routes: plaintext and TLS, both versions of
//! HTTP and opaque connections, and the addresses that a host may have.

use bytes::Bytes;
use diy_mesh_testkit::wait::until;
use rcgen::SanType;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::version::{TLS12, TLS13};
use rustls::{ServerConfig, SupportedProtocolVersion};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::context::external;
use crate::endpoint::{ExternalHost, ServerTls};
use crate::route::matching::Match;
use crate::route::{BackendRef, RouteBackend, Routes, Rule};
use crate::secure::identity::testing::{Authority, pem};
use crate::secure::tls::parse_roots;
use crate::serve::attempts::Attempts;

const HOST: &str = "api.example.test";
const LOCAL: &[&str] = &["127.0.0.0/8"];
const BODY: usize = 200_000;

/// The certificate of a server with this name.
type Certificate = (CertificateDer<'static>, PrivateKeyDer<'static>);

fn certificate(authority: &Authority, name: &str) -> Certificate {
    let (leaf, key) = authority.leaf_and_key("spiffe://none", |params| {
        params.subject_alt_names = vec![SanType::DnsName(name.try_into().unwrap())];
    });
    let key = PrivatePkcs8KeyDer::from(key.serialize_der());
    (leaf, PrivateKeyDer::Pkcs8(key))
}

/// A server that responds to GET requests with a body, and echoes other bytes. It has the heads of
/// the requests.
struct Api {
    address: SocketAddr,
    heads: Rc<RefCell<Vec<String>>>,
}

impl Api {
    async fn plain(address: &str) -> Self {
        Self::start(address, None).await
    }

    async fn secured(
        certificate: &Certificate,
        version: &'static SupportedProtocolVersion,
        alpn: &[&str],
    ) -> Self {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.0.clone()], certificate.1.clone_key())
            .unwrap();
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        Self::start("127.0.0.1:0", Some(TlsAcceptor::from(Arc::new(config)))).await
    }

    async fn start(address: &str, acceptor: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let heads = Rc::new(RefCell::new(Vec::new()));
        let shared = heads.clone();
        tokio::task::spawn_local(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (acceptor, heads) = (acceptor.clone(), shared.clone());
                tokio::task::spawn_local(async move {
                    let Some(acceptor) = acceptor else {
                        return serve(stream, false, heads).await;
                    };
                    if let Ok(stream) = acceptor.accept(stream).await {
                        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                        serve(stream, is_http2, heads).await;
                    }
                });
            }
        });
        Self { address, heads }
    }

    fn requests(&self) -> usize {
        self.heads.borrow().len()
    }
}

async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    is_http2: bool,
    heads: Rc<RefCell<Vec<String>>>,
) {
    if is_http2 {
        let Ok(mut connection) = h2::server::handshake(stream).await else {
            return;
        };
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            heads.borrow_mut().push(request.uri().to_string());
            let mut body = respond
                .send_response(http::Response::new(()), false)
                .unwrap();
            body.send_data(Bytes::from(vec![b'x'; BODY]), true).unwrap();
        }
        return;
    }
    let mut bytes = [0; 4096];
    while let Ok(read @ 1..) = stream.read(&mut bytes).await {
        let text = String::from_utf8_lossy(&bytes[..read]).into_owned();
        if text.starts_with("GET ") {
            heads.borrow_mut().push(text.clone());
            let status = if text.starts_with("GET /undelivered") {
                "502 No\r\nx-mesh-error: connect-failed"
            } else {
                "200 OK"
            };
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {BODY}\r\n\r\n");
            let response = [head.as_bytes(), &vec![b'x'; BODY]].concat();
            if stream.write_all(&response).await.is_err() {
                return;
            }
        } else if stream.write_all(&bytes[..read]).await.is_err() {
            return;
        }
        if stream.flush().await.is_err() {
            return;
        }
    }
}

fn tls(server_name: &str, authority: &Authority) -> Option<Arc<ServerTls>> {
    Some(Arc::new(ServerTls {
        server_name: server_name.to_owned().try_into().unwrap(),
        roots: parse_roots(&pem(&authority.certificate())).unwrap(),
        configs: Default::default(),
    }))
}

fn host(port: u16, tls: Option<Arc<ServerTls>>) -> Arc<ExternalHost> {
    Arc::new(ExternalHost {
        name: "XBackend shop/api".into(),
        host: HOST.into(),
        port,
        tls,
    })
}

/// A Service whose routes send requests and connections to these backends.
fn routed(backends: Vec<(BackendRef, u32)>) -> Rc<Backend> {
    let backend = |(to, weight)| RouteBackend {
        to: Some(to),
        weight,
        changes: Arc::default(),
    };
    let rule = Arc::new(Rule {
        name: "HTTPRoute shop/web".into(),
        backends: backends.into_iter().map(backend).collect(),
        ..Rule::default()
    });
    let routes = Routes::new(vec![Match::default()], vec![rule.clone()]);
    let target = Target {
        kind: TargetKind::Service,
        namespace: "shop".to_owned(),
        name: "web".to_owned(),
        routes: Some(Arc::new(routes.with_connections(Some(rule)))),
        ..Target::default()
    };
    let (_, updates) = watch::channel(Arc::new(target));
    let service: SocketAddr = "10.96.0.7:80".parse().unwrap();
    Rc::new(Backend::watched(service, updates, &Rc::default()))
}

fn to_host(host: &Arc<ExternalHost>) -> Rc<Backend> {
    routed(vec![(BackendRef::External(host.clone()), 1)])
}

impl Pod {
    /// A pod whose name server has these addresses of the host.
    async fn of_host(policy: Arc<Policy>, addresses: &[&str]) -> Self {
        let pod = Self::new(policy).await;
        pod.set_addresses(addresses);
        pod
    }

    fn set_addresses(&self, addresses: &[&str]) {
        let addresses: Vec<_> = addresses.iter().map(|ip| ip.parse().unwrap()).collect();
        self.names.set(HOST, &addresses);
    }

    async fn get_from(&self, backend: &Rc<Backend>) -> String {
        request(&mut self.connect_to(backend.clone()).await, "web").await
    }

    /// The status, the error of the proxy, and the length of the body.
    async fn get_http2(&self, backend: &Rc<Backend>) -> (u16, String, usize) {
        let client = self.connect_to(backend.clone()).await;
        let (mut client, connection) = h2::client::handshake(client).await.unwrap();
        tokio::task::spawn_local(connection);
        let head = http::Request::get("http://web/").body(()).unwrap();
        let (response, _) = client.send_request(head, true).unwrap();
        let (head, mut body) = response.await.unwrap().into_parts();
        let mut length = 0;
        while let Some(data) = body.data().await {
            let data = data.unwrap();
            length += data.len();
            body.flow_control().release_capacity(data.len()).unwrap();
        }
        let error = head.headers.get("x-mesh-error");
        let error = error.map_or("", |error| error.to_str().unwrap());
        (head.status.as_u16(), error.to_owned(), length)
    }
}

fn error_of(response: &str) -> &str {
    let field = response.split("x-mesh-error: ").nth(1);
    field.map_or(response, |rest| rest.lines().next().unwrap_or_default())
}

#[test]
fn requests_reach_a_host_in_plaintext() {
    on_worker(async {
        for policy in [allow(LOCAL), allow(&[HOST, LOCAL[0]])] {
            let pod = Pod::of_host(policy, &["127.0.0.1"]).await;
            let api = Api::plain("127.0.0.1:0").await;
            let backend = to_host(&host(api.address.port(), None));
            let response = pod.get_from(&backend).await;
            assert!(response.starts_with("HTTP/1.1 200"), "{response}");
            assert!(response.len() > BODY);
            // The application's host field stays.
            assert!(api.heads.borrow()[0].contains("\r\nHost: web\r\n"));
            let mut client = pod.connect_to(backend).await;
            assert!(is_echoed(&mut client, b"\0\0ping").await);
            let today = day(std::time::SystemTime::now());
            let edges = pod.worker.metrics.edges.unsent(&mut None, today).unwrap();
            assert_eq!(
                edges.edges[0].destination,
                format!("{HOST}:{}", api.address.port())
            );
        }
    });
}

#[test]
fn requests_reach_a_host_over_tls() {
    on_worker(async {
        let authority = Authority::new("public");
        let certificate = certificate(&authority, HOST);
        for version in [&TLS12, &TLS13] {
            let pod = Pod::of_host(allow(LOCAL), &["127.0.0.1"]).await;
            let api = Api::secured(&certificate, version, &["h2", "http/1.1"]).await;
            let backend = to_host(&host(api.address.port(), tls(HOST, &authority)));
            for _ in 0..3 {
                let response = pod.get_from(&backend).await;
                assert!(response.starts_with("HTTP/1.1 200"), "{response}");
                assert!(response.len() > BODY);
                let expected = (200, String::new(), BODY);
                assert_eq!(pod.get_http2(&backend).await, expected);
                let mut client = pod.connect_to(backend.clone()).await;
                let bytes: Vec<u8> = (0..60_000_u32).map(|at| (at % 251) as u8).collect();
                assert!(is_echoed(&mut client, &[b"\0\0", &bytes[..]].concat()).await);
            }
            let heads = api.heads.take();
            assert!(heads[0].starts_with("GET / HTTP/1.1\r\nHost: web\r\n"));
            assert_eq!(heads[1], "https://web/");
            // A server that knows no ALPN.
            let old = Api::secured(&certificate, version, &[]).await;
            let backend = to_host(&host(old.address.port(), tls(HOST, &authority)));
            let response = pod.get_from(&backend).await;
            assert!(response.starts_with("HTTP/1.1 200"), "{response}");
            let (status, error, _) = pod.get_http2(&backend).await;
            assert_eq!((status, &*error), (502, "handshake-failed"));
            assert_eq!(old.requests(), 1);
        }
    });
}

#[test]
fn server_that_does_not_prove_its_name_gets_nothing() {
    on_worker(async {
        let (authority, other) = (Authority::new("public"), Authority::new("other"));
        let certificate = certificate(&authority, HOST);
        let pod = Pod::of_host(allow(LOCAL), &["127.0.0.1"]).await;
        for version in [&TLS12, &TLS13] {
            let api = Api::secured(&certificate, version, &["h2", "http/1.1"]).await;
            let public = Some(Arc::new(ServerTls {
                server_name: HOST.try_into().unwrap(),
                roots: vec![],
                configs: Default::default(),
            }));
            for settings in [
                tls("www.example.test", &authority),
                tls(HOST, &other),
                public,
            ] {
                let backend = to_host(&host(api.address.port(), settings));
                let response = pod.get_from(&backend).await;
                assert_eq!(error_of(&response), "handshake-failed", "{response}");
                let (_, error, _) = pod.get_http2(&backend).await;
                assert_eq!(error, "handshake-failed");
                let mut client = pod.connect_to(backend).await;
                assert!(!is_echoed(&mut client, b"\0\0ping").await);
            }
            assert_eq!(api.requests(), 0);
        }
        // Nor does one without TLS.
        let plain = Api::plain("127.0.0.1:0").await;
        let backend = to_host(&host(plain.address.port(), tls(HOST, &authority)));
        let response = pod.get_from(&backend).await;
        assert_eq!(error_of(&response), "handshake-failed", "{response}");
        assert_eq!(plain.requests(), 0);
    });
}

#[test]
fn external_server_is_no_peer() {
    on_worker(async {
        let authority = Authority::new("public");
        let certificate = certificate(&authority, HOST);
        let api = Api::secured(&certificate, &TLS13, &["http/1.1"]).await;
        let pod = Pod::of_host(allow(LOCAL), &["127.0.0.1"]).await;
        let backend = to_host(&host(api.address.port(), tls(HOST, &authority)));
        let mut client = pod.connect_to(backend).await;
        // A peer's proxy would get the number of attempts, and could say that nothing was delivered.
        let head = "GET /undelivered HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\
                    grpc-previous-rpc-attempts: 3\r\n\r\n";
        client.write_all(head.as_bytes()).await.unwrap();
        let mut response = String::new();
        client.read_to_string(&mut response).await.unwrap();
        assert!(response.starts_with("HTTP/1.1 502"), "{response}");
        assert!(!response.contains("x-mesh-error"), "{response}");
        let heads = api.heads.take();
        assert!(
            heads.len() == 1 && !heads[0].contains("x-mesh"),
            "{heads:?}"
        );
    });
}

#[test]
fn connections_with_other_settings_are_not_shared() {
    use crate::upstream::connect::Remote;
    let (authority, other) = (Authority::new("public"), Authority::new("other"));
    let remote = |tls: Option<Arc<ServerTls>>| {
        Remote::from(&EndpointInfo {
            external: Some(host(443, tls)),
            ..EndpointInfo::bare("192.0.2.1:443".parse().unwrap())
        })
    };
    let all = [
        remote(None),
        remote(tls(HOST, &authority)),
        remote(tls("www.example.test", &authority)),
        remote(tls(HOST, &other)),
    ];
    for (index, one) in all.iter().enumerate() {
        assert!(all[index + 1..].iter().all(|other| one != other));
    }
    assert_eq!(remote(tls(HOST, &authority)), all[1]);
}

#[test]
fn another_address_is_tried_and_changes_are_followed() {
    on_worker(async {
        let pod = Pod::of_host(allow(LOCAL), &["127.0.0.3", "127.0.0.1"]).await;
        let first = Api::plain("127.0.0.1:0").await;
        let port = first.address.port();
        let second = Api::plain(&format!("127.0.0.2:{port}")).await;
        let host = host(port, None);
        let backend = to_host(&host);
        for _ in 0..4 {
            let response = pod.get_from(&backend).await;
            assert!(response.starts_with("HTTP/1.1 200"), "{response}");
        }
        let pass_ttl = async || {
            tokio::time::pause();
            tokio::time::advance(std::time::Duration::from_secs(6)).await;
            tokio::time::resume();
        };
        let to = BackendRef::External(host.clone());
        let addresses = async || {
            let backend = pod.worker.backend(&to).await;
            let outside = backend.external().map(|to| to.address.ip().to_string());
            (backend.endpoints_len(), outside.unwrap_or_default())
        };
        let moved = (1, "127.0.0.2".to_owned());
        pod.set_addresses(&["127.0.0.2"]);
        pass_ttl().await;
        while addresses().await != moved {
            tokio::task::yield_now().await;
        }
        let before = first.requests();
        assert!(pod.get_from(&backend).await.starts_with("HTTP/1.1 200"));
        assert_eq!((first.requests(), second.requests()), (before, 1));
        // Policies count at once.
        pod.set(allow(&[HOST])).await;
        while addresses().await.0 > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(error_of(&pod.get_from(&backend).await), "unresolved");
        pod.set(allow(LOCAL)).await;
        while addresses().await != moved {
            tokio::task::yield_now().await;
        }
        pod.set_addresses(&["127.0.0.1", "127.0.0.2"]);
        pass_ttl().await;
        while addresses().await.0 != 2 {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn addresses_stay_without_an_answer_and_their_task_ends() {
    on_worker(async {
        let pod = Pod::of_host(allow(LOCAL), &["127.0.0.1"]).await;
        let info = Arc::new(EndpointInfo::bare("127.0.0.1:80".parse().unwrap()));
        let own = pod.worker.clone();
        let to = BackendRef::External(host(80, None));
        let backend = own.backend(&to).await;
        assert_eq!(backend.endpoints_len(), 1);
        assert!(Rc::ptr_eq(&backend, &own.backend(&to).await));
        // The worker, this function, the task of its maintenance and the task of the backend.
        let before = Rc::strong_count(&pod.worker);
        own.destinations.evict_idle(std::time::Instant::now());
        drop(backend);
        let later = std::time::Instant::now() + std::time::Duration::from_secs(3600);
        own.destinations.evict_idle(later);
        own.destinations
            .evict_idle(later + std::time::Duration::from_secs(3600));
        until(|| Rc::strong_count(&pod.worker) < before).await;
        let context = WorkerContext::for_a_test("");
        let mut deaf = Worker::new(context);
        Rc::get_mut(&mut deaf).unwrap().resolver = Resolver::new(std::path::Path::new("/none"));
        let unresolved = external::resolve(&deaf, &host(80, None), &[]).await;
        assert!(
            matches!(unresolved.kind, TargetKind::Unresolved { .. }),
            "{unresolved:?}"
        );
        let public = EndpointInfo {
            external: Some(host(80, None)),
            ..EndpointInfo::bare("45.51.100.1:80".parse().unwrap())
        };
        let known = [Arc::new(public), info];
        let kept = external::resolve(&deaf, &host(80, None), &known).await;
        assert_eq!(kept.kind, TargetKind::Service);
        assert!(kept.endpoints.len() == 1 && Arc::ptr_eq(&kept.endpoints[0], &known[0]));
    });
}

#[test]
fn ipv6_counts_for_hosts_without_ipv4() {
    on_worker(async {
        let pod = Pod::of_host(Arc::default(), &["2600::1", "45.51.100.1"]).await;
        let to = async |port| {
            let to = BackendRef::External(host(port, None));
            let outside = pod.worker.backend(&to).await.external();
            outside.map(|to| to.address.ip().to_string())
        };
        assert_eq!(to(80).await.as_deref(), Some("45.51.100.1"));
        let pod = Pod::of_host(Arc::default(), &["2600::1"]).await;
        let to = BackendRef::External(host(80, None));
        let outside = pod.worker.backend(&to).await.external().unwrap();
        assert_eq!(outside.to_string(), format!("{HOST} at [2600::1]:80"));
    });
}

/// A pod whose controller knows these addresses, and the Service "shop/v1:80" at `service`.
async fn pod_of_cluster(
    policy: Arc<Policy>,
    known: Vec<(&'static str, Target)>,
    service: Option<SocketAddr>,
) -> Pod {
    pod_with_arguments("", policy, known, service).await
}

async fn pod_with_arguments(
    arguments: &str,
    policy: Arc<Policy>,
    known: Vec<(&'static str, Target)>,
    service: Option<SocketAddr>,
) -> Pod {
    let discovery = |policy| {
        let (discovery, mut questions) = Discovery::by_hand_with(policy);
        tokio::task::spawn_local(async move {
            let mut senders = Vec::new();
            loop {
                let (resource, answer) = questions.next().await;
                let target = match resource.address() {
                    Some(address) => {
                        let ip = address.ip().to_string();
                        let known = known.iter().find(|(known, _)| *known == ip);
                        known.map_or_else(Target::default, |(_, target)| target.clone())
                    }
                    None => Target {
                        endpoints: service
                            .map(|address| {
                                Arc::new(EndpointInfo {
                                    outside: false,
                                    ..EndpointInfo::bare(address)
                                })
                            })
                            .into_iter()
                            .collect(),
                        ..TargetKind::Service.into()
                    },
                };
                senders.push(answer(Arc::new(target)));
            }
        });
        discovery
    };
    Pod::with_arguments(arguments, policy, discovery).await
}

#[test]
fn no_name_leads_to_private_addresses_if_the_setting_refuses_them_and_no_block_allows_them() {
    const REFUSE: &str = " --refuse-private-names";
    on_worker(async {
        let outside = || Target {
            place: Place::Outside,
            ..Target::default()
        };
        for (ip, arguments, destinations, is_allowed) in [
            ("10.0.0.1", "", &[HOST][..], true),
            ("10.0.0.1", REFUSE, &[HOST], false),
            ("100.64.0.1", REFUSE, &[HOST], false),
            ("10.0.0.1", REFUSE, &[HOST, "10.0.0.0/8"], true),
            ("10.0.0.1", REFUSE, &[HOST, "11.0.0.0/8"], false),
            ("45.51.100.1", REFUSE, &[HOST], true),
        ] {
            let known = vec![(ip, outside()), ("127.0.0.1", outside())];
            let policy = allow(destinations);
            let pod = pod_with_arguments(arguments, policy, known, None).await;
            pod.set_addresses(&[ip]);
            let case = format!("{ip} {arguments} {destinations:?}");
            // The application dials another address of the name.
            let dialed = pod.dialed.address;
            let mut backend = pod.worker.destinations.get_or_watch(dialed).await;
            let flow = pod.flow(dialed, backend.clone());
            let mut permit = flow.authorize_connection().unwrap();
            let found = find(&flow, Some(HOST.to_owned()), &mut backend, &mut permit).await;
            // A route has the host as its backend.
            let target = external::resolve(&pod.worker, &host(80, None), &[]).await;
            assert_eq!(target.endpoints.len(), usize::from(is_allowed), "{case}");
            assert_eq!(found.is_ok(), is_allowed, "{case}");
            if !is_allowed {
                let told = [found.unwrap_err().to_string(), format!("{:?}", target.kind)];
                for text in told {
                    let expected = "private: with egress.privateNames=false no name leads there, \
                                    but a block of addresses in a policy may";
                    assert!(text.contains(expected), "{text}");
                }
            }
        }
    });
}

#[test]
fn no_host_leads_to_local_addresses_or_into_the_cluster() {
    on_worker(async {
        let of_place = |place| Target {
            place,
            ..Target::default()
        };
        let known = vec![
            ("45.51.100.1", of_place(Place::Outside)),
            ("10.0.0.1", of_place(Place::Outside)),
            ("45.51.100.2", of_place(Place::Node)),
            ("45.51.100.3", TargetKind::Pod.into()),
            ("45.51.100.4", TargetKind::Service.into()),
            ("45.51.100.5", TargetKind::Withheld.into()),
        ];
        let all = [
            "127.0.0.1",
            "169.254.169.254",
            "10.0.0.9",
            "10.0.0.1",
            "45.51.100.1",
            "45.51.100.2",
            "45.51.100.3",
            "45.51.100.4",
            "45.51.100.5",
        ];
        for (policy, expected) in [
            (Arc::default(), &["10.0.0.1:80", "45.51.100.1:80"][..]),
            (allow(&[HOST]), &["10.0.0.1:80", "45.51.100.1:80"]),
            // Addresses that the policy denies are left out. Addresses of pods are left out whatever it
            // allows.
            (
                allow(&["45.51.100.0/30"]),
                &["45.51.100.1:80", "45.51.100.2:80"],
            ),
        ] {
            let pod = pod_of_cluster(policy, known.clone(), None).await;
            pod.set_addresses(&all);
            let target = external::resolve(&pod.worker, &host(80, None), &[]).await;
            let endpoints = target.endpoints.iter().map(|info| info.address.to_string());
            assert_eq!(endpoints.collect::<Vec<_>>(), expected);
        }
        let pod = pod_of_cluster(Arc::default(), known, None).await;
        pod.set_addresses(&["127.0.0.1", "45.51.100.3"]);
        let backend = to_host(&host(80, None));
        let response = pod.get_from(&backend).await;
        assert_eq!(error_of(&response), "unresolved", "{response}");
        assert!(response.contains("local or of the cluster"), "{response}");
        assert!(!is_echoed(&mut pod.connect_to(backend).await, b"\0\0ping").await);
    });
}

#[test]
fn request_names_no_other_host_than_closed_egress_allows() {
    on_worker(async {
        let by_name = allow(&[HOST, "www.example.test"]);
        let by_address = allow(&["45.51.100.0/24"]);
        let is_found = async |policy: &Arc<Policy>, name: &str| {
            let outside = Target {
                place: Place::Outside,
                ..Target::default()
            };
            let known = vec![("45.51.100.1", outside)];
            let pod = pod_of_cluster(policy.clone(), known, None).await;
            pod.set_addresses(&["45.51.100.1"]);
            let to = BackendRef::External(host(80, None));
            let mut backend = pod.worker.backend(&to).await;
            let flow = pod.flow(pod.dialed.address, to_host(&host(80, None)));
            let mut permit = flow.authorize_connection().unwrap();
            let name = crate::egress::name_of(name.as_bytes());
            let found = find(&flow, name, &mut backend, &mut permit).await;
            found.map_err(|failure| failure.code().label())
        };
        for (name, is_allowed) in [
            (HOST, true),
            ("API.example.test.:80", true),
            ("www.example.test", true),
            ("web", true),
            ("web.shop", true),
            ("web.shop.svc", true),
            ("web.shop.svc.cluster.local", true),
            ("10.96.0.7:80", true),
            ("evil.example.test", false),
            ("web.shop.svc.evil.test", false),
            ("web.other", false),
            ("webs", false),
        ] {
            let found = is_found(&by_name, name).await;
            let expected = if is_allowed {
                Ok(None)
            } else {
                Err("egress-denied")
            };
            assert_eq!(found, expected, "{name}");
            // Who may call the address may name any host, as without policies.
            assert_eq!(is_found(&by_address, name).await, Ok(None), "{name}");
            assert_eq!(is_found(&Arc::default(), name).await, Ok(None), "{name}");
        }
    });
}

#[test]
fn closed_egress_has_to_allow_the_host() {
    on_worker(async {
        let outside = Target {
            place: Place::Outside,
            ..Target::default()
        };
        for (policy, is_allowed) in [
            (Arc::default(), true),
            (allow(&[HOST]), true),
            (allow(&["*.example.test"]), true),
            (allow(&["45.51.100.1/32"]), true),
            (allow(&["www.example.test", "192.0.2.0/24"]), false),
            (
                egress(
                    &[
                        (Action::Allow, &["45.51.100.1/32"]),
                        (Action::Deny, &[HOST]),
                    ],
                    false,
                ),
                false,
            ),
        ] {
            let known = vec![("45.51.100.1", outside.clone())];
            let pod = pod_of_cluster(policy, known, None).await;
            pod.set_addresses(&["45.51.100.1"]);
            let to = BackendRef::External(host(80, None));
            let mut backend = pod.worker.backend(&to).await;
            let flow = pod.flow(pod.dialed.address, to_host(&host(80, None)));
            let mut permit = flow.authorize_connection().unwrap();
            let name = Some("web".to_owned());
            find(&flow, name, &mut backend, &mut permit).await.unwrap();
            let mut attempts = Attempts::new(&flow, &backend, Default::default(), permit);
            let began = attempts.begin(&flow).map(|attempt| attempt.outside);
            let today = day(std::time::SystemTime::now());
            let edges = pod.worker.metrics.edges.unsent(&mut None, today);
            assert_eq!(
                edges.is_some_and(|message| !message.edges.is_empty()),
                is_allowed
            );
            match began {
                Ok(outside) => {
                    let name = outside.unwrap().name;
                    assert!(is_allowed && name.as_deref() == Some(HOST));
                }
                Err(failure) => {
                    assert!(!is_allowed);
                    assert_eq!(failure.code().label(), "egress-denied");
                    let text = format!("{HOST} at 45.51.100.1:80");
                    assert!(failure.to_string().contains(&text), "{failure}");
                }
            }
        }
        let pod = Pod::of_host(allow(&["127.0.0.1/32"]), &["127.0.0.1"]).await;
        let api = Api::plain("127.0.0.1:0").await;
        let backend = to_host(&host(api.address.port(), None));
        assert!(pod.get_from(&backend).await.starts_with("HTTP/1.1 200"));
        let mut opaque = pod.connect_to(backend.clone()).await;
        assert!(is_echoed(&mut opaque, b"\0\0ping").await);
        // A later policy ends what it denies.
        pod.set(allow(&["192.0.2.0/24"])).await;
        assert!(!matches!(opaque.read(&mut [0]).await, Ok(1..)));
        assert!(!pod.get_from(&backend).await.starts_with("HTTP/1.1 200"));
        assert_eq!(api.requests(), 1);
    });
}

#[test]
fn weights_divide_requests_between_a_service_and_a_host() {
    on_worker(async {
        let (api, app) = (
            Api::plain("127.0.0.1:0").await,
            Api::plain("127.0.0.1:0").await,
        );
        let pod = pod_of_cluster(allow(LOCAL), vec![], Some(app.address)).await;
        pod.set_addresses(&["127.0.0.1"]);
        let backend = routed(vec![
            (BackendRef::Service("shop/v1:80".into()), 1),
            (BackendRef::External(host(api.address.port(), None)), 3),
        ]);
        for _ in 0..100 {
            let response = pod.get_from(&backend).await;
            assert!(response.starts_with("HTTP/1.1 200"), "{response}");
        }
        let (of_app, of_api) = (app.requests(), api.requests());
        assert!(
            of_app + of_api == 100 && (5..50).contains(&of_app),
            "{of_app}"
        );
    });
}
