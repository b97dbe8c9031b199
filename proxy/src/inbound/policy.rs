//! Step 4: authorization of a connection that carries no HTTP, and of each request. A strict workload
//! accepts only authenticated peers, and AuthorizationPolicies decide who of the accepted clients may
//! call. Pure: all inputs are arguments.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use diy_mesh_model::identity::Identity;
use diy_mesh_model::ports::PortSet;
use diy_mesh_proto::authorization::{Authorization, Call, Denial, Request, fields};
use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::telemetry::Telemetry;

use crate::egress::{Egress, Outside};
use crate::error::Failure;
use crate::http::credentials::{Credentials, PolicyFields, bearer};
use crate::http::view::RequestView;
use crate::inbound::external::{Asking, Authorizer, RouteAuthorizers};
use crate::inbound::limit::RateLimits;
use crate::inbound::token::Issuers;

/// The client of a connection, as far as it has authenticated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// The pod's own application: its outbound connections.
    App,
    /// A client without mutual TLS.
    Unauthenticated,
    /// A workload of the mesh, authenticated by mutual TLS.
    Peer(Arc<Identity>),
}

impl Caller {
    /// The identity, for a record of the call.
    pub fn shared_identity(&self) -> Option<Arc<Identity>> {
        match self {
            Self::Peer(identity) => Some(identity.clone()),
            Self::App | Self::Unauthenticated => None,
        }
    }

    /// The identity, if the client has authenticated with one.
    pub fn identity(&self) -> Option<&Identity> {
        match self {
            Self::Peer(identity) => Some(identity),
            Self::App | Self::Unauthenticated => None,
        }
    }
}

/// The client of a connection, and the port of the application that it leads to.
#[derive(Clone, Copy, Debug)]
pub struct Client<'a> {
    /// As far as it has authenticated.
    pub caller: &'a Caller,
    /// Its address.
    pub address: IpAddr,
    /// The port of the application.
    pub port: u16,
}

impl<'a> Client<'a> {
    /// A request of the client, or its connection that carries no HTTP.
    fn call(
        self,
        request: Option<&'a RequestView<'_>>,
        credentials: Option<&'a Credentials>,
    ) -> Call<'a> {
        Call {
            identity: self.caller.identity(),
            address: self.address.to_canonical(),
            port: self.port,
            host: None,
            request: request.map(|request| request as &dyn Request),
            token: credentials.and_then(|credentials| credentials.token.as_ref()),
        }
    }
}

/// The proof that a policy allows a request or a connection. Without it, there is no attempt to send
/// it: no protocol can forget authorization.
#[derive(Debug)]
pub struct Permit {
    named: Option<Outside>,
}

impl Permit {
    const GRANTED: Self = Self { named: None };

    /// It is for this destination outside of the cluster, which was found by its name.
    pub fn name(&mut self, destination: Outside) {
        self.named = Some(destination);
    }

    /// The destination, if it was found by its name.
    pub fn into_named(self) -> Option<Outside> {
        self.named
    }
}

/// The policy of the pod: who may call it, and what it may call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Nothing has arrived from the controller yet: no client may call.
    pub pending: bool,
    /// Only authenticated peers are accepted.
    pub strict: bool,
    /// The ports of the application whose connections are copied without detection.
    pub opaque_ports: PortSet,
    /// The application accepts CONNECT requests.
    pub allow_connect: bool,
    /// Rules about paths match plain paths only.
    pub plain_paths: bool,
    /// The zone of the pod's node. Empty: unknown.
    pub zone: String,
    /// The limits of its requests.
    pub rate_limits: RateLimits,
    /// The policies about calls to the application. `None` permits all callers.
    pub authorization: Option<Policies>,
    /// The policies about the application's calls to outside of the cluster. `None` permits all
    /// destinations.
    pub egress: Option<Egress>,
    /// The telemetry of the proxy's traffic, or `None` if the arguments decide.
    pub telemetry: Option<Arc<Telemetry>>,
}

/// The AuthorizationPolicies of the pod.
#[derive(Clone, Debug)]
pub struct Policies {
    authorization: Arc<Authorization>,
    /// The issuers of tokens, or `None` if no policy reads tokens.
    issuers: Option<Arc<Issuers>>,
    /// The authorization servers of each policy.
    asking: Arc<[Asking]>,
    /// Rules and routes match plain paths only.
    plain_paths: bool,
    /// The fields that the application gets from policies, never from clients.
    fields: PolicyFields,
}

impl Policies {
    /// Compiles the message of the controller. `routes` has, for each policy, its routes if it has
    /// some.
    pub fn compile(
        message: &proto::Authorization,
        routes: impl IntoIterator<Item = Option<RouteAuthorizers>>,
    ) -> Self {
        let routes = routes.into_iter().chain(std::iter::repeat_with(|| None));
        let policies = message.policies.iter().zip(routes);
        Self {
            authorization: Arc::new(Authorization::compile(message)),
            issuers: Issuers::compile(message).map(Arc::new),
            asking: policies
                .map(|(policy, routes)| Asking::new(policy, routes))
                .collect(),
            plain_paths: message.plain_paths,
            fields: policy_fields(message),
        }
    }

    /// The issuers of which tokens have named unknown keys since the last call.
    pub fn take_unknown_keys(&self) -> BTreeSet<String> {
        let issuers = self.issuers.as_ref();
        issuers.map_or_else(BTreeSet::new, |issuers| issuers.take_unknown_keys())
    }

    /// The most specific pattern of a path in the policies.
    pub fn pattern(&self, port: u16, path: &[u8]) -> Option<&proto::AuthorizedPath> {
        self.authorization.pattern(port, path)
    }
}

/// Only the same policies are equal.
impl PartialEq for Policies {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.authorization, &other.authorization)
    }
}

impl Eq for Policies {}

impl Policy {
    /// The policy that a controller sends. It does not weaken the settings of the pod itself, because
    /// controllers of earlier releases cannot read them.
    pub fn from_controller(self, own: &Self) -> Self {
        Self {
            pending: false,
            strict: self.strict || own.strict,
            opaque_ports: own.opaque_ports.clone(),
            allow_connect: own.allow_connect,
            plain_paths: own.plain_paths,
            ..self
        }
    }

    /// Whether the client may have a connection to the application that carries no HTTP.
    pub fn authorize_connection(&self, client: Client<'_>) -> Result<Permit, Failure> {
        self.accept(client)?;
        self.judge(client, None, None)?;
        Ok(Permit::GRANTED)
    }

    /// The parts of a request that the policies read and set. `None` if there are none. Its token is
    /// not verified yet.
    pub fn credentials(
        &self,
        client: Client<'_>,
        request: &RequestView<'_>,
    ) -> Option<Box<Credentials>> {
        let policies = self.policies_for(client)?;
        if policies.issuers.is_none() && policies.fields.is_empty() {
            return None;
        }
        let mut credentials = Box::new(Credentials::new(&policies.fields));
        if policies.issuers.is_some() {
            let sent = bearer(request).map(|token| token.map(str::to_owned));
            credentials.sent = sent.transpose();
        }
        Some(credentials)
    }

    /// Verifies the token of a request.
    pub fn verify(&self, client: Client<'_>, credentials: &mut Credentials) {
        let policies = self.policies_for(client);
        if let Some(issuers) = policies.and_then(|policies| policies.issuers.as_ref()) {
            issuers.read(client.port, credentials);
        }
    }

    /// The fields that the application gets from policies, never from clients.
    pub fn policy_fields(&self, client: Client<'_>) -> Option<&PolicyFields> {
        let fields = &self.policies_for(client)?.fields;
        Some(fields).filter(|fields| !fields.is_empty())
    }

    /// The authorization servers that are asked about a request that the policies allow, each once.
    pub fn authorizers(
        &self,
        client: Client<'_>,
        request: &RequestView<'_>,
        credentials: Option<&Credentials>,
    ) -> Result<Vec<Arc<Authorizer>>, Failure> {
        let mut authorizers = vec![];
        let Some(policies) = self.policies_for(client) else {
            return Ok(authorizers);
        };
        let call = client.call(Some(request), credentials);
        for position in policies.authorization.external(&call) {
            let asked = policies.asking[position].of_request(request, policies.plain_paths);
            for one in asked.map_err(Failure::TooLargeToMatch)? {
                if !authorizers.contains(&one) {
                    authorizers.push(one);
                }
            }
        }
        Ok(authorizers)
    }

    /// Refuses a request that no token changes. Returns whether there are no tokens to verify: then the
    /// policies allow the request.
    pub fn authorize_before_token(
        &self,
        client: Client<'_>,
        request: &RequestView<'_>,
    ) -> Result<Option<Permit>, Failure> {
        let policies = self.policies_for(client);
        let Some(policies) = policies.filter(|policies| policies.issuers.is_some()) else {
            return self.authorize_request(client, request, None).map(Some);
        };
        self.accept_request(client, request)?;
        let call = client.call(Some(request), None);
        let verdict = policies.authorization.judge_before_token(&call);
        verdict.map_err(|denial| Failure::Denied { denial, id: None })?;
        Ok(None)
    }

    fn accept_request(&self, client: Client<'_>, request: &RequestView<'_>) -> Result<(), Failure> {
        self.accept(client)?;
        if *client.caller != Caller::App && !self.allow_connect && request.is_connect() {
            return Err(Failure::ConnectNotAllowed);
        }
        Ok(())
    }

    /// Whether the request may be forwarded to the application.
    pub fn authorize_request(
        &self,
        client: Client<'_>,
        request: &RequestView<'_>,
        credentials: Option<&Credentials>,
    ) -> Result<Permit, Failure> {
        self.accept_request(client, request)?;
        self.judge(client, Some(request), credentials)?;
        Ok(Permit::GRANTED)
    }

    /// A strict workload refuses clients that have not authenticated, and one without policies all.
    fn accept(&self, client: Client<'_>) -> Result<(), Failure> {
        match client.caller {
            Caller::Unauthenticated if self.strict => Err(Failure::MtlsRequired),
            Caller::Unauthenticated | Caller::Peer(_) if self.pending => Err(Failure::NotReady),
            _ => Ok(()),
        }
    }

    /// Whether the AuthorizationPolicies allow a request, or a connection that carries no HTTP.
    pub fn judge(
        &self,
        client: Client<'_>,
        request: Option<&RequestView<'_>>,
        credentials: Option<&Credentials>,
    ) -> Result<(), Failure> {
        let Some(policies) = self.policies_for(client) else {
            return Ok(());
        };
        let call = client.call(request, credentials);
        let verdict = policies.authorization.judge(&call);
        verdict.map_err(|denial| match credentials {
            Some(credentials) if denial.refuses_token => Failure::InvalidToken {
                policy: denial.policy,
                refusal: Box::new(credentials.refused.clone()),
            },
            _ => Failure::Denied { denial, id: None },
        })
    }

    /// Whether the application may call a destination outside of the cluster.
    pub fn judge_outside(&self, to: &Outside) -> Result<(), Failure> {
        match &self.egress {
            _ if self.pending => Err(Failure::NotReady),
            Some(egress) => egress.judge(to),
            None => Ok(()),
        }
    }

    /// The denial of an allowed call, if the policies under audit were in force too.
    pub fn audit(
        &self,
        client: Client<'_>,
        request: Option<&RequestView<'_>>,
        credentials: Option<&Credentials>,
    ) -> Option<Denial> {
        let policies = self.policies_for(client)?;
        policies
            .authorization
            .audit(&client.call(request, credentials))
    }

    /// The policies that the client is subject to. The pod's own application is subject to the policies
    /// of the pods that it calls.
    fn policies_for(&self, client: Client<'_>) -> Option<&Policies> {
        let policies = self.authorization.as_ref();
        policies.filter(|_| *client.caller != Caller::App)
    }
}

/// The fields that policies in force set from claims, or from what authorization servers answer.
fn policy_fields(message: &proto::Authorization) -> PolicyFields {
    let policies = message.policies.iter().filter(|policy| !policy.audit);
    let fields = policies.flat_map(fields);
    let fields: BTreeSet<Arc<str>> = fields.map(Arc::from).collect();
    fields.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::view::testing::request;

    fn peer() -> Caller {
        Caller::Peer(Arc::new(
            Identity::new("cluster.local", "shop", "web").expect("an identity"),
        ))
    }

    fn client(caller: &Caller) -> Client<'_> {
        Client {
            caller,
            address: [10, 0, 0, 7].into(),
            port: 8080,
        }
    }

    /// Denies everything.
    fn deny_all(policy: Policy) -> Policy {
        let all = proto::Authorization {
            deny_by_default: true,
            default_name: "AuthorizationPolicy shop/none".to_owned(),
            ..proto::Authorization::default()
        };
        Policy {
            authorization: Some(Policies::compile(&all, [])),
            ..policy
        }
    }

    #[test]
    fn own_application_is_not_judged() {
        let policy = deny_all(Policy::default());
        let health = request("GET", "/healthz");
        let authorize = |caller: &Caller| {
            let request = policy.authorize_request(client(caller), &health, None);
            let connection = policy.authorize_connection(client(caller));
            (request.is_ok(), connection.is_ok())
        };
        assert_eq!(authorize(&Caller::App), (true, true));
        assert_eq!(authorize(&peer()), (false, false));
        assert_eq!(authorize(&Caller::Unauthenticated), (false, false));
    }

    #[test]
    fn no_client_may_call_before_the_policies_arrive() {
        let policy = Policy {
            pending: true,
            ..Policy::default()
        };
        let health = request("GET", "/healthz");
        for caller in [peer(), Caller::Unauthenticated] {
            let request = policy.authorize_request(client(&caller), &health, None);
            assert!(matches!(request, Err(Failure::NotReady)));
            let connection = policy.authorize_connection(client(&caller));
            assert!(matches!(connection, Err(Failure::NotReady)));
        }
        assert!(policy.authorize_connection(client(&Caller::App)).is_ok());
        let configured = Policy::default().from_controller(&policy);
        assert!(configured.authorize_connection(client(&peer())).is_ok());
    }

    #[test]
    fn strict_mode_and_connect_are_checked_before_the_policies() {
        let policy = deny_all(Policy::default());
        let tunnel = policy.authorize_request(client(&peer()), &request("CONNECT", "a:1"), None);
        assert!(matches!(tunnel, Err(Failure::ConnectNotAllowed)));
        let strict = Policy {
            strict: true,
            ..policy
        };
        let plain = strict.authorize_connection(client(&Caller::Unauthenticated));
        assert!(matches!(plain, Err(Failure::MtlsRequired)));
        let denied = strict.authorize_connection(client(&peer()));
        assert!(matches!(denied, Err(Failure::Denied { .. })));
    }

    #[test]
    fn controller_weakens_no_settings_of_the_pod() {
        let policy = |strict, ports: &str, allow_connect, zone: &str| Policy {
            strict,
            opaque_ports: ports.parse().expect("ports"),
            allow_connect,
            zone: zone.to_owned(),
            ..Policy::default()
        };
        let own = policy(true, "25", false, "");
        let sent = policy(false, "80", true, "eu-1a");
        assert_eq!(
            sent.from_controller(&own),
            policy(true, "25", false, "eu-1a")
        );
        let stricter = policy(true, "", false, "");
        let own = policy(false, "25", true, "");
        assert_eq!(stricter.from_controller(&own), policy(true, "25", true, ""));
    }

    #[test]
    fn strict_workload_accepts_only_peers_and_its_own_application() {
        let policy = Policy {
            strict: true,
            ..Policy::default()
        };
        let health = request("GET", "/healthz");
        for caller in [peer(), Caller::App] {
            assert!(
                policy
                    .authorize_request(client(&caller), &health, None)
                    .is_ok()
            );
            assert!(policy.authorize_connection(client(&caller)).is_ok());
        }
        let unauthenticated = Caller::Unauthenticated;
        assert!(matches!(
            policy.authorize_request(client(&unauthenticated), &health, None),
            Err(Failure::MtlsRequired)
        ));
        assert!(
            policy
                .authorize_connection(client(&unauthenticated))
                .is_err()
        );
    }

    #[test]
    fn permissive_workload_accepts_unauthenticated_clients() {
        let policy = Policy::default();
        assert!(
            policy
                .authorize_request(client(&Caller::Unauthenticated), &request("GET", "/"), None)
                .is_ok()
        );
        assert!(
            policy
                .authorize_connection(client(&Caller::Unauthenticated))
                .is_ok()
        );
    }

    #[test]
    fn connect_requires_the_annotation() {
        let (closed, open) = (
            Policy::default(),
            Policy {
                allow_connect: true,
                ..Policy::default()
            },
        );
        for method in ["CONNECT", "connect"] {
            let tunnel = request(method, "a:1");
            for caller in [Caller::Unauthenticated, peer()] {
                assert!(matches!(
                    closed.authorize_request(client(&caller), &tunnel, None),
                    Err(Failure::ConnectNotAllowed)
                ));
                assert!(
                    open.authorize_request(client(&caller), &tunnel, None)
                        .is_ok()
                );
            }
            assert!(
                closed
                    .authorize_request(client(&Caller::App), &tunnel, None)
                    .is_ok(),
                "the app may ask others for one"
            );
        }
    }
}
