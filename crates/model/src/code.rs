//! The failures of the proxy, one row each: what clients, metrics and the documents call them. The
//! table of errors in docs/reference/http.md has the same rows.

/// The names of the statuses of gRPC calls, each at its number.
pub const GRPC_STATUSES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// The status of a gRPC call, as in `statuscodes.md` of the gRPC core documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Grpc {
    DeadlineExceeded = 4,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    Unauthenticated = 16,
}

impl Grpc {
    /// The name in that document.
    pub fn name(self) -> &'static str {
        GRPC_STATUSES[self as usize]
    }
}

macro_rules! codes {
    ($($name:ident: $label:literal, $statuses:expr, $grpc:expr, $meaning:literal, $check:literal;)*) => {
        /// The code of a failure.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Code {
            $(#[doc = $meaning] $name,)*
        }

        impl Code {
            /// All codes, each at its own position.
            pub const ALL: [Self; [$($label),*].len()] = [$(Self::$name),*];

            /// The code with this label.
            pub fn of(label: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|code| code.label() == label)
            }

            /// The value of `x-mesh-error`, and of the label `code` of metrics.
            pub const fn label(self) -> &'static str {
                match self { $(Self::$name => $label,)* }
            }

            /// The HTTP status, and then the statuses of special cases. Empty if a policy sets the
            /// status.
            pub const fn statuses(self) -> &'static [u16] {
                match self { $(Self::$name => $statuses,)* }
            }

            /// The gRPC status; none, if it follows from the HTTP status.
            pub const fn grpc(self) -> Option<Grpc> {
                match self { $(Self::$name => $grpc,)* }
            }

            /// The failure, in Markdown.
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$name => $meaning,)* }
            }

            /// The checks that find the cause, in Markdown.
            pub const fn check(self) -> &'static str {
                match self { $(Self::$name => $check,)* }
            }
        }
    };
}

codes! {
    NoEndpoint: "no-endpoint", &[503], Some(Grpc::Unavailable),
        "the Service has no ready endpoint",
        "`kubectl get endpointslices`; the selector of the Service; `mesh check` for failing probes";
    UnknownPort: "unknown-port", &[503], Some(Grpc::Unavailable),
        "the Service does not have the port",
        "the body: it lists the ports of the Service";
    NoRoute: "no-route", &[404], Some(Grpc::Unimplemented),
        "the Service has routes, and none matches the request",
        "the matches of the routes: paths are compared as sent";
    InvalidBackend: "invalid-backend", &[500], Some(Grpc::Unavailable),
        "the rule has no backend, or names an invalid one",
        "the condition `ResolvedRefs` of the route";
    InvalidRoutes: "invalid-routes", &[500], Some(Grpc::Unavailable),
        "the caller's proxy cannot apply the routes of the Service, and has no earlier ones",
        "the body: it names the field; the versions of proxy and controller";
    FaultInjected: "fault-injected", &[], None,
        "a fault of a TrafficPolicy replaces the response, with its status",
        "the body: it names the policy; `spec.faults`";
    Withheld: "withheld", &[503], Some(Grpc::Unavailable),
        "the destination is or was meshed, and the controller has not sent its endpoints; nothing is sent in plaintext",
        "`kubectl get pods -n service-mesh -l app=controller`; that the Service still exists";
    ConnectFailed: "connect-failed", &[502], Some(Grpc::Unavailable),
        "the pod (or, at the callee, the application) does not accept connections",
        "that the application listens on this port of the pod's address, not only on 127.0.0.1; `targetPort` of the Service";
    ConnectTimeout: "connect-timeout", &[504], Some(Grpc::DeadlineExceeded),
        "no connection was established within 3 seconds",
        "NetworkPolicies, the network of the node";
    UpstreamClosed: "upstream-closed", &[502], Some(Grpc::Unavailable),
        "the upstream closed the connection before it sent a response",
        "the application's log for a crash";
    RetriedStatus: "retried-status", &[502], Some(Grpc::Unavailable),
        "the upstream responded with a status that the route retries, and no further attempt was possible",
        "the application; `spec.rules.retry` of the route";
    UpstreamMalformed: "upstream-malformed", &[502], Some(Grpc::Unavailable),
        "the response is not valid HTTP, or its header or trailer section exceeds 64 KiB (8 RESOURCE_EXHAUSTED then)",
        "the application: if it does not speak HTTP at this port, list the port in `diy-service-mesh/opaque-ports` of its pod";
    RateLimited: "rate-limited", &[429], Some(Grpc::ResourceExhausted),
        "the request exceeds a rate limit of the pod; `Retry-After` and `grpc-retry-pushback-ms` name the time until the next one",
        "the body: it names the limit; `spec.rateLimits` of the TrafficPolicy ([details](troubleshooting.md#429-with-x-mesh-error-rate-limited))";
    BadRequest: "bad-request", &[400], Some(Grpc::Internal),
        "the request violates HTTP, or is ambiguous",
        "the client; the body names the rule";
    HeadersTooLarge: "headers-too-large", &[431], Some(Grpc::ResourceExhausted),
        "the header section exceeds 64 KiB or 128 fields, or the trailer section 64 KiB",
        "the client, for example large cookies";
    TooLargeToMatch: "too-large-to-match", &[431, 414], Some(Grpc::ResourceExhausted),
        "the regular expressions of routes, faults or rate limits would judge more than 1 MiB of the request; a byte counts for each expression; 414 for path and query",
        "the client; the number of expressions";
    RequestTimeout: "request-timeout", &[408], Some(Grpc::DeadlineExceeded),
        "the request header, or the part of the body that an authorization server gets, did not arrive within 30 seconds",
        "the client; `forwardBody` of streams";
    Overloaded: "overloaded", &[503], Some(Grpc::ResourceExhausted),
        "the proxy has reached a limit",
        "the number of open connections, and of destinations in use";
    MemoryExhausted: "memory-exhausted", &[503], Some(Grpc::ResourceExhausted),
        "the memory of the proxy for the client was used up after the application had got a part of the request",
        "as for `overloaded`; the size of the requests";
    UpstreamOverloaded: "upstream-overloaded", &[503], Some(Grpc::ResourceExhausted),
        "all connections or requests that the upstream may have are in use, and none became free in time",
        "the load of the application; its number of replicas; the body names the limit and the TrafficPolicy";
    CircuitOpen: "circuit-open", &[503], Some(Grpc::Unavailable),
        "too many requests to the Service failed, and the circuit breaker of its TrafficPolicy is open",
        "the failures of the Service; the body names the policy ([details](#circuit-breaker))";
    NoCertificate: "no-certificate", &[503], Some(Grpc::Unavailable),
        "the destination is meshed, and the caller's proxy has no valid certificate; nothing is sent in plaintext",
        "the log and `/ready` of the caller's proxy; the controller ([details](troubleshooting.md#503-with-x-mesh-error-no-certificate))";
    HandshakeFailed: "handshake-failed", &[502], Some(Grpc::Unavailable),
        "the upstream did not authenticate as the workload that discovery expects, or as the external host, or rejected the caller's certificate",
        "the body: it names the upstream's identity ([details](troubleshooting.md#502-with-x-mesh-error-handshake-failed))";
    MtlsRequired: "mtls-required", &[403], Some(Grpc::PermissionDenied),
        "the workload is strict, and the caller did not use mutual TLS",
        "add the caller to the mesh, or set the workload to `permissive`";
    NotReady: "not-ready", &[503], Some(Grpc::Unavailable),
        "the pod has just started: its proxy has no policies from the controller yet",
        "the log and `/ready` of the callee's proxy; the controller";
    InvalidToken: "invalid-token", &[401], Some(Grpc::Unauthenticated),
        "the request has a bearer token, and no AuthorizationPolicy at the port accepts it",
        "the body: it says what is wrong with the token, but not which issuers, audiences and keys are accepted; the reason and the policy are in the log of the callee's proxy; `spec.issuers`";
    Denied: "denied", &[403], Some(Grpc::PermissionDenied),
        "the AuthorizationPolicies of the pod do not allow the call",
        "the body: it names policy and rule to callers of the same namespace; to others it tells an identifier, which the log of the callee's proxy has with them";
    EgressDenied: "egress-denied", &[403], Some(Grpc::PermissionDenied),
        "the destination is outside of the cluster, and the AuthorizationPolicies of the caller's pod do not allow it",
        "the body: it names the policy, and the name or the address; `mesh egress`";
    Unresolved: "unresolved", &[502], Some(Grpc::Unavailable),
        "the policies allow the name of the destination, or a route names it, and the proxy finds no address of it that it may use",
        "the body; the name servers of the pod";
    ExternallyDenied: "externally-denied", &[], None,
        "the authorization server of an AuthorizationPolicy or of a route denies the request; status, fields and body are its own",
        "the log of the authorization server; the policy is in the log of the callee's proxy";
    AuthorizerFailed: "authorizer-failed", &[503], Some(Grpc::Unavailable),
        "the authorization server of an AuthorizationPolicy or of a route did not answer",
        "the log of the callee's proxy: it names the policy and the reason; `spec.externalAuth`";
    ConnectNotAllowed: "connect-not-allowed", &[405], Some(Grpc::Unimplemented),
        "a CONNECT request to a pod that does not allow it; the proxy cannot inspect the tunnel",
        "the annotation `diy-service-mesh/allow-connect` of the pod, if its application is a forward proxy";
    Timeout: "timeout", &[504], Some(Grpc::DeadlineExceeded),
        "the response did not end within a timeout of the route, or within the `grpc-timeout` of the caller",
        "the body: it names the timeout; `spec.rules.timeouts` of the route; the latency of the upstream";
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn each_code_has_its_own_position_and_label_and_is_an_error() {
        let labels: HashSet<&str> = Code::ALL.iter().map(|code| code.label()).collect();
        assert_eq!(labels.len(), Code::ALL.len());
        for (position, code) in Code::ALL.into_iter().enumerate() {
            assert_eq!(code as usize, position);
            assert_eq!(Code::of(code.label()), Some(code));
            assert!(
                code.statuses()
                    .iter()
                    .all(|status| (400..600).contains(status))
            );
            assert_eq!(
                code.statuses().is_empty(),
                code.grpc().is_none(),
                "{code:?}"
            );
        }
    }
}
