//! Objects of the tests of routes, in the sandbox and on a cluster. Pure values.

/// Service `web`, whose pods are version 1.0, and the Services `web-v1` and `web-v2` of one version
/// each, with their Deployments.
pub fn servers(namespace: &str) -> String {
    let one = |name: &str, version: &str| {
        format!(
            "---
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: {namespace}}}
spec: {{selector: {{app: {name}}}, ports: [{{name: http, port: 80, targetPort: 8080}}]}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}, namespace: {namespace}}}
spec:
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata:
      labels: {{app: {name}}}
      annotations: {{diy-service-mesh/inject: 'true'}}
    spec:
      containers:
        - name: http-server
          image: diy-sm-http-server:dev
          imagePullPolicy: IfNotPresent
          env: [{{name: VERSION, value: '{version}'}}]
          startupProbe: {{tcpSocket: {{port: 8080}}, periodSeconds: 1, failureThreshold: 60}}
"
        )
    };
    let web = format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: {namespace}}}
spec: {{selector: {{app: web-v1}}, ports: [{{name: http, port: 80, targetPort: 8080}}]}}
"
    );
    web + &one("web-v1", "1.0") + &one("web-v2", "2.0")
}

/// An HTTPRoute of Service `web` in namespace `parent` with these rules, a YAML list.
pub fn http_route(namespace: &str, name: &str, parent: &str, rules: &str) -> String {
    format!(
        "
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {{name: {name}, namespace: {namespace}}}
spec:
  parentRefs: [{{group: '', kind: Service, name: web, namespace: {parent}, port: 80}}]
  rules: {rules}
"
    )
}

/// A rule for `GET /hello` that sends this percentage to version 2.0.
pub fn canary(percentage: u32) -> String {
    format!(
        "{{matches: [{{path: {{type: Exact, value: /hello}}}}], backendRefs: [\
         {{name: web-v1, port: 80, weight: {}}}, {{name: web-v2, port: 80, weight: {percentage}}}]}}",
        100 - percentage
    )
}

/// A rule for requests that match, a YAML value, with one backend, a YAML value.
pub fn rule(matches: &str, backend: &str) -> String {
    format!("{{matches: [{matches}], backendRefs: [{backend}]}}")
}

/// A TrafficSplit of Service `web` that sends this percentage to version 2.0: of the requests in an
/// HTTPRouteGroup, or of all requests if its name is empty.
pub fn traffic_split(namespace: &str, percentage: u32, group: &str) -> String {
    let matches = match group {
        "" => "[]".to_owned(),
        name => format!("[{{kind: HTTPRouteGroup, name: {name}}}]"),
    };
    format!(
        "
apiVersion: split.smi-spec.io/v1alpha4
kind: TrafficSplit
metadata: {{name: web, namespace: {namespace}}}
spec:
  service: web
  matches: {matches}
  backends: [{{service: web-v1, weight: {}}}, {{service: web-v2, weight: {percentage}}}]
",
        100 - percentage
    )
}

/// The HTTPRouteGroup `testers`: requests with these headers, a YAML mapping.
pub fn route_group(namespace: &str, headers: &str) -> String {
    format!(
        "
apiVersion: specs.smi-spec.io/v1alpha4
kind: HTTPRouteGroup
metadata: {{name: testers, namespace: {namespace}}}
spec:
  matches: [{{name: testers, pathRegex: '/.*', methods: [GET], headers: {headers}}}]
"
    )
}

/// A TrafficPolicy of Service shop/web with one section, in YAML.
pub fn traffic_policy(section: &str) -> String {
    format!(
        "
apiVersion: diy-service-mesh.dev/v1alpha1
kind: TrafficPolicy
metadata: {{name: web, namespace: shop}}
spec:
  targetRefs: [{{group: '', kind: Service, name: web}}]
  {section}
"
    )
}

/// A permission for HTTPRoutes of namespace `from` to use the Services of a namespace.
pub fn grant(namespace: &str, from: &str) -> String {
    format!(
        "
apiVersion: gateway.networking.k8s.io/v1beta1
kind: ReferenceGrant
metadata: {{name: routes, namespace: {namespace}}}
spec:
  from: [{{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: {from}}}]
  to: [{{group: '', kind: Service}}]
"
    )
}

/// The number of successes of a binomial distribution that a correct implementation stays within:
/// six standard deviations. From 100 samples on, with a probability from 10% to 90%, less than one
/// of ten million runs exceeds them.
pub fn binomial_bounds(number: usize, probability: f64) -> std::ops::RangeInclusive<usize> {
    let (n, p) = (number as f64, probability);
    let (mean, deviation) = (n * p, (n * p * (1.0 - p)).sqrt());
    let first = (mean - 6.0 * deviation).max(0.0).floor() as usize;
    first..=((mean + 6.0 * deviation).ceil() as usize).min(number)
}
