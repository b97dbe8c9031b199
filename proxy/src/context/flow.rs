//! The context of one connection along the path: its worker, its direction, its two ends and its
//! caller.

use std::cell::OnceCell;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::SystemTime;

use diy_mesh_model::exchange::{Direction, ExchangeId};
use diy_mesh_model::identity::Identity;
use diy_mesh_proto::authorization::Denial;
use diy_mesh_proto::field::{EXCHANGE, OF_REQUESTS, PREVIOUS_ATTEMPTS};
use diy_mesh_runtime::admission::network;
use http::{HeaderName, HeaderValue};

use crate::context::worker::Worker;
use crate::egress::Outside;
use crate::error::Failure;
use crate::http::credentials::{Credentials, PolicyFields};
use crate::http::edits::MeshField;
use crate::http::view::{Fields, RequestView};
use crate::inbound::edges::NewEdge;
use crate::inbound::external::Authorizer;
use crate::inbound::policy::{Caller, Client, Permit};
use crate::labels::Verdict;
use crate::limits::lifetime::Expiry;
use crate::limits::memory::{Charge, ConnectionSlot, Holder};
use crate::limits::timeouts::{IdleTimer, TimeoutKind};
use crate::observe::metrics::Counted;
use crate::protocol::Protocol;
use crate::route::matching::MatchInput;
use crate::route::{Plan, Service};
use crate::secure::io::Io;
use crate::upstream::balance::Backend;

/// The name of the field [`EXCHANGE`] in HTTP/1.
const EXCHANGE_FIELD: &str = "x-mesh-exchange: ";
const X_MESH_EXCHANGE: HeaderName = HeaderName::from_static(EXCHANGE);
/// The field in which a gRPC client tells how often it has sent a call before (gRPC proposal A6).
const GRPC_PREVIOUS_ATTEMPTS: &str = "grpc-previous-rpc-attempts";

/// One connection on its way through the proxy.
#[derive(Clone)]
pub struct Flow {
    /// The worker that serves it.
    pub worker: Rc<Worker>,
    /// To the application or from it.
    pub direction: Direction,
    /// The client's address.
    pub peer: SocketAddr,
    /// The original destination.
    pub original: SocketAddr,
    /// The backend that discovery resolves the destination to. Routes may name another backend.
    pub destination: Rc<Backend>,
    /// The client, as far as it has authenticated.
    pub caller: Caller,
    /// The slot of the connection, and what it holds.
    pub slot: Rc<ConnectionSlot>,
    /// The value of `X-Called-By`, which all requests of the connection share.
    pub called_by: OnceCell<Option<HeaderValue>>,
    /// The counters of its requests in the metrics.
    pub counted: Counted,
}

/// The decisions that allowed a request, or a connection, when it began.
#[derive(Clone, Debug)]
pub struct Allowed {
    /// The version of the policy.
    version: u64,
    /// The authorization servers that were asked.
    pub authorizers: Vec<Arc<Authorizer>>,
    /// The endpoint, if it is outside of the cluster.
    pub outside: Option<Outside>,
}

/// The statements of the sender of a request about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Announced {
    /// How often it was sent before.
    pub attempts: u32,
    /// The identifier that the caller's proxy has given it.
    pub exchange: Option<ExchangeId>,
}

impl Announced {
    /// Adds the fields to a head in HTTP/1, of which `head` comes before and `rest` after them.
    pub fn insert(self, head: &[u8], rest: &[u8]) -> Vec<u8> {
        let id = self.exchange.map(ExchangeId::digits);
        let [name, value, end]: [&[u8]; 3] = match &id {
            Some(id) => [EXCHANGE_FIELD.as_bytes(), id, b"\r\n"],
            None => [&[]; 3],
        };
        let attempts = match self.attempts {
            0 => String::new(),
            attempts => format!("{PREVIOUS_ATTEMPTS}: {attempts}\r\n"),
        };
        [head, name, value, end, attempts.as_bytes(), rest].concat()
    }

    /// Adds the fields to a head in HTTP/2. The identifier is no use to the compression of others, but
    /// its name is: `is_first` on a connection, the field goes into the table of HPACK (RFC 7541,
    /// section 2.3.2), and those after it do not spell its name.
    pub fn add_to(self, fields: &mut diy_mesh_http2::Fields, is_first: bool) {
        let id = self
            .exchange
            .map(|id| HeaderValue::from_bytes(&id.digits()));
        if let Some(Ok(mut id)) = id {
            id.set_sensitive(!is_first);
            fields.push(&X_MESH_EXCHANGE, &id);
        }
        if self.attempts > 0 {
            let name = HeaderName::from_static(PREVIOUS_ATTEMPTS);
            fields.push(&name, &self.attempts.into());
        }
    }
}

impl Flow {
    /// The declared protocol. Inbound, only the pod's own opaque ports count; outbound, what
    /// discovery knows of the destination.
    pub fn declared_protocol(&self) -> Option<Protocol> {
        let port = self.original.port();
        let is_opaque = || self.worker.policy().opaque_ports.contains(port);
        match self.direction {
            Direction::Inbound => is_opaque().then_some(Protocol::Opaque),
            Direction::Outbound => self.destination.app_protocol(),
        }
    }

    /// Charges the connection to the caller, who is known from now on.
    pub fn assign_slot(&self) {
        self.slot.reassign(&self.holder().path());
    }

    /// The caller, as a holder of slots, bytes and log lines.
    pub fn holder(&self) -> Holder {
        match &self.caller {
            Caller::App => Holder::App,
            Caller::Unauthenticated => Holder::Plaintext(network(self.peer.ip())),
            Caller::Peer(identity) => Holder::Peer(identity.clone()),
        }
    }

    /// A charge for what the connection holds.
    pub fn charge(&self) -> Charge {
        Charge::new(self.slot.clone())
    }

    /// The client, as policies see it.
    fn client(&self) -> Client<'_> {
        Client {
            caller: &self.caller,
            address: self.peer.ip(),
            port: self.original.port(),
        }
    }

    /// Whether the client may have a connection to the application that carries no HTTP.
    pub fn authorize_connection(&self) -> Result<Permit, Failure> {
        let permit = self.worker.policy().authorize_connection(self.client());
        permit.map_err(|failure| self.conceal(failure))
    }

    /// Whether the client may have a connection before it has sent anything: its destination has no
    /// name yet.
    pub fn authorize_silent_client(&self) -> Result<(), Failure> {
        self.authorize_connection()?;
        match self.outside() {
            Some(address) => {
                let to = Outside {
                    address,
                    name: None,
                };
                self.worker.policy().judge_outside(&to)
            }
            None => Ok(()),
        }
    }

    /// The original destination, if it is outside of the cluster.
    pub fn outside(&self) -> Option<SocketAddr> {
        let address = self.destination.outside();
        address.filter(|_| self.direction == Direction::Outbound)
    }

    /// Refuses a request that no token changes. Returns the permit if there are no tokens to verify.
    pub fn authorize_before_token(
        &self,
        request: &RequestView<'_>,
    ) -> Result<Option<Permit>, Failure> {
        let policy = self.worker.policy();
        let permit = policy.authorize_before_token(self.client(), request);
        permit.map_err(|failure| self.conceal(failure))
    }

    /// Verifies the token of a request.
    pub fn verify(&self, credentials: &mut Credentials) {
        self.worker.policy().verify(self.client(), credentials);
    }

    /// Whether the request may be forwarded to the application.
    pub fn authorize_request(
        &self,
        request: &RequestView<'_>,
        credentials: Option<&Credentials>,
    ) -> Result<Permit, Failure> {
        let policy = self.worker.policy();
        let permit = policy.authorize_request(self.client(), request, credentials);
        permit.map_err(|failure| self.conceal(failure))
    }

    /// The fields in which the application gets claims. Clients cannot set them.
    pub fn policy_fields(&self) -> Option<PolicyFields> {
        self.worker.policy().policy_fields(self.client()).cloned()
    }

    /// The authorization servers that are asked about an allowed request.
    pub fn authorizers(
        &self,
        request: &RequestView<'_>,
        credentials: Option<&Credentials>,
    ) -> Result<Vec<Arc<Authorizer>>, Failure> {
        let policy = self.worker.policy();
        policy.authorizers(self.client(), request, credentials)
    }

    /// The decisions that allow a request, or a connection, from now on.
    pub fn allowed(&self) -> Allowed {
        Allowed {
            version: self.worker.policy_version(),
            authorizers: vec![],
            outside: None,
        }
    }

    /// Judges an allowed request again, or a connection that carries no HTTP, if the policy has
    /// changed.
    pub fn judge_again<'a>(
        &self,
        allowed: &mut Allowed,
        request: impl FnOnce() -> Option<RequestView<'a>>,
    ) -> Result<(), Failure> {
        let current = self.worker.policy_version();
        if std::mem::replace(&mut allowed.version, current) == current {
            return Ok(());
        }
        self.judge(request().as_ref(), allowed)
    }

    /// Whether the AuthorizationPolicies allow a request, or a connection that carries no HTTP, which
    /// began when others did. No authorization server is asked again.
    pub fn judge(
        &self,
        request: Option<&RequestView<'_>>,
        allowed: &Allowed,
    ) -> Result<(), Failure> {
        let (policy, client) = (self.worker.policy(), self.client());
        if let Some(outside) = &allowed.outside {
            policy.judge_outside(outside)?;
        }
        let mut credentials = request.and_then(|request| policy.credentials(client, request));
        if let Some(credentials) = &mut credentials {
            policy.verify(client, credentials);
        }
        let credentials = credentials.as_deref();
        let verdict = policy.judge(client, request, credentials);
        verdict.map_err(|failure| self.conceal(failure))?;
        let asked = request.map(|request| policy.authorizers(client, request, credentials));
        let mut asked = asked.transpose()?.into_iter().flatten();
        match asked.find(|one| !allowed.authorizers.contains(one)) {
            None => Ok(()),
            Some(authorizer) => Err(Failure::AuthorizerFailed {
                policy: authorizer.policy.clone(),
                reason: "the request began before the policy".to_owned(),
            }),
        }
    }

    /// Counts an allowed request, or a connection that carries no HTTP, and whether the policies under
    /// audit would deny it. Returns the denial.
    pub fn audit(
        &self,
        request: Option<&RequestView<'_>>,
        credentials: Option<&Credentials>,
    ) -> Option<Denial> {
        let (policy, metrics) = (self.worker.policy(), &self.worker.metrics);
        metrics.verdict(self.direction, Verdict::Allowed);
        let denial = policy.audit(self.client(), request, credentials)?;
        metrics.verdict(self.direction, Verdict::WouldDeny);
        Some(denial)
    }

    /// The edge of an allowed request, or of a connection that carries no HTTP, if it is new.
    pub fn new_edge(&self, request: Option<&RequestView<'_>>) -> Option<Box<NewEdge>> {
        if self.direction == Direction::Outbound || self.worker.config.hide_edges {
            return None;
        }
        let policy = self.worker.policy();
        let edges = &self.worker.edges;
        edges.find(self.client(), request, policy.authorization.as_ref())
    }

    /// Gives a denial an identifier, which callers of other namespaces are told in place of the policy.
    fn conceal(&self, mut failure: Failure) -> Failure {
        if let Failure::Denied { id, .. } = &mut failure {
            let own = self.worker.tls.identity();
            let is_neighbor = own
                .zip(self.caller.identity())
                .is_some_and(|(own, caller)| {
                    own.trust_domain() == caller.trust_domain()
                        && own.namespace() == caller.namespace()
                });
            if !is_neighbor {
                *id = Some(self.worker.rng.borrow_mut().u32(..));
            }
        }
        failure
    }

    /// The token that the policies of the pod read from a request. `None`: they read no token.
    pub fn credentials(&self, request: &RequestView<'_>) -> Option<Box<Credentials>> {
        self.worker.policy().credentials(self.client(), request)
    }

    /// Step 5: the plan of a request.
    pub fn plan(&self, request: RequestView<'_>) -> Plan {
        let Some(routes) = self.destination.routes() else {
            return Plan::default();
        };
        let service = Service {
            name: &self.destination.name(),
            is_pod: self.destination.is_pod(),
            address: self.original,
        };
        let (request, rng) = (MatchInput::new(request), &self.worker.rng);
        routes.plan(&request, &service, SystemTime::now, &mut rng.borrow_mut())
    }

    /// The backend of a request. Waits for the first response of discovery about a new one.
    pub async fn backend(&self, plan: &Plan) -> Rc<Backend> {
        match plan.backend() {
            // Boxed: most destinations have no routes.
            Some(to) => Box::pin(self.worker.backend(to)).await,
            None => self.destination.clone(),
        }
    }

    /// Step 5 of a connection that carries no HTTP: its backend. Each call for a connection makes the
    /// same choice. A pod stays the backend.
    pub async fn connection_backend(&self) -> Result<Rc<Backend>, Failure> {
        let own = &self.destination;
        let Some(routes) = self.destination.routes().filter(|_| !own.is_pod()) else {
            return Ok(own.clone());
        };
        let mut rng = self.worker.rng_of(self.peer);
        match routes.connection_backend(&mut rng)? {
            Some(to) => Ok(Box::pin(self.worker.backend(to)).await),
            None => Ok(own.clone()),
        }
    }

    /// The expiry of this connection while it and `upstream` are in use: one of the two leads to a
    /// peer's proxy, or neither.
    pub fn expiry(&self, client: &Io, upstream: &Io) -> Expiry {
        let to_peer = if client.lifetime().is_some() {
            client
        } else {
            upstream
        };
        self.worker.expiry(to_peer, self.direction)
    }

    /// The end of this connection while its bytes are copied to `upstream` and back: its expiry, the
    /// idle timeout, the end of its slot, or a policy later than `allowed` that does not allow it: as
    /// the `request` that began a tunnel, or as a connection that carries no HTTP. To be polled after
    /// each transfer.
    pub fn copy_end<'a>(
        &'a self,
        client: &Io,
        upstream: &Io,
        mut allowed: Allowed,
        request: Option<RequestView<'a>>,
    ) -> impl Future<Output = ()> + Unpin + use<'a> {
        let mut expiry = self.expiry(client, upstream);
        let mut idle = IdleTimer::new(self.worker.config.timeouts.opaque_idle);
        poll_fn(move |cx| {
            self.slot.touch();
            if self.slot.is_ended() {
                return Poll::Ready(());
            }
            if self.judge_again(&mut allowed, || request).is_err() {
                return Poll::Ready(());
            }
            if idle.poll_active(cx).is_ready() {
                self.count_timeout(TimeoutKind::OpaqueIdle);
                return Poll::Ready(());
            }
            Pin::new(&mut expiry).poll(cx)
        })
    }

    /// Counts a timeout of this connection.
    pub fn count_timeout(&self, kind: TimeoutKind) {
        self.worker.metrics.timeout(self.direction, kind);
        tracing::debug!(peer = %self.peer, kind = kind.name(), "timeout");
    }

    /// The value of `X-Called-By` for the application.
    pub fn called_by(&self) -> Option<&str> {
        self.caller.identity().map(Identity::as_str)
    }

    /// The changes that the proxy makes to every request's head: only it tells the application the
    /// caller's identity, and the next proxy the previous attempts, which no application gets.
    pub fn request_edits(&self) -> [MeshField<'_>; OF_REQUESTS.len()] {
        let value = || HeaderValue::from_str(self.called_by()?).ok();
        [
            MeshField("X-Called-By", self.called_by.get_or_init(value).as_ref()),
            MeshField(PREVIOUS_ATTEMPTS, None),
            MeshField(EXCHANGE, None),
        ]
    }

    /// The statements about the request by the proxy of the caller, or by the gRPC library of the
    /// application.
    pub fn announced(&self, request: &dyn Fields) -> Announced {
        let by_proxy =
            self.direction == Direction::Inbound && matches!(self.caller, Caller::Peer(_));
        let is = |name: &[u8], other: &str| name.eq_ignore_ascii_case(other.as_bytes());
        let mut announced = Announced::default();
        request.visit(&mut |name, value| {
            if is(name, GRPC_PREVIOUS_ATTEMPTS) || by_proxy && is(name, PREVIOUS_ATTEMPTS) {
                let number = std::str::from_utf8(value).ok();
                let number = number.and_then(|text| text.parse().ok());
                announced.attempts = announced.attempts.max(number.unwrap_or(0));
            } else if by_proxy && is(name, EXCHANGE) {
                announced.exchange = ExchangeId::of_digits(self.peer.ip(), value);
            }
        });
        announced
    }

    /// The identifier of an exchange that begins now. The pod's own address is the address of the
    /// application's end of the connection.
    pub fn new_exchange(&self) -> ExchangeId {
        let own = match self.direction {
            Direction::Inbound => self.original,
            Direction::Outbound => self.peer,
        };
        ExchangeId::new(own.ip(), self.worker.recent.number())
    }

    /// The proxy shuts down.
    pub fn is_draining(&self) -> bool {
        self.worker.drain.is_cancelled()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_requests_of_a_connection_keep_their_identifier_out_of_the_table() {
        let announced = Announced {
            attempts: 1,
            exchange: Some(ExchangeId::new([10, 0, 0, 7].into(), 7)),
        };
        let fields = |is_first| {
            let mut headers = diy_mesh_http2::Fields::default();
            announced.add_to(&mut headers, is_first);
            http::HeaderMap::from(&headers)
        };
        let (first, later) = (fields(true), fields(false));
        assert_eq!(first, later);
        assert_eq!(first[EXCHANGE], "000000000007");
        assert!(!first[EXCHANGE].is_sensitive() && later[EXCHANGE].is_sensitive());
    }
}
