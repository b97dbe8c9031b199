//! The section `telemetry` of a TrafficPolicy: its fields, and their conversion to the message of the
//! contract, which `diy_mesh_proto::telemetry` checks. Access logs and traces have the names of the
//! Gateway API's TelemetryPolicy (GEP-4768). Pure.

use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::route::is_hostname;
use diy_mesh_proto::telemetry::Telemetry as Compiled;
use proto::dump_settings::Mode;
use proto::trace_attribute::Value;
use serde::Deserialize;

#[cfg(test)]
use super::tests::crd;
use crate::kinds::route::filters::share;
use crate::kinds::route::spec::Fraction;
use crate::object::Rejection;
use crate::object::fields::{Milliseconds, Name, Named, one_of};
use crate::object::rejection::{unsupported, violates};

/// The telemetry of the proxies of the pods of the Service about their traffic.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct Telemetry {
    /// Dumps. Absent: as the annotation of the pod says.
    pub dump: Option<Dump>,
    /// A line on standard output for each request and each connection that carries no HTTP.
    pub access_logs: Option<AccessLogs>,
    /// Spans of requests, for a collector.
    pub tracing: Option<Tracing>,
}

/// Conditions on the traffic that is dumped, all of which hold. A pod's annotation bounds it.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["mode"])))]
#[serde(default, rename_all = "camelCase")]
pub struct Dump {
    /// Full: with bodies, where the annotation permits them. Headers. Off.
    pub mode: Option<Name<Mode>>,
    /// A prefix of the path, of whole elements.
    #[cfg_attr(test, schemars(regex(pattern = "^/"), length(max = 256)))]
    pub path: Option<String>,
    /// The status of the response: at least this one, or a class such as 5xx.
    #[cfg_attr(test, schemars(regex(pattern = "^[1-5]([0-9]{2}|xx)$")))]
    pub status: Option<String>,
    /// The caller: a namespace, or NAMESPACE/SERVICE-ACCOUNT.
    #[cfg_attr(
        test,
        schemars(regex(pattern = "^[-a-z0-9]+(/[-.a-z0-9]+)?$"), length(max = 320))
    )]
    pub caller: Option<String>,
    /// The time that it takes at least.
    #[cfg_attr(test, schemars(with = "Option<crd::Limited>"))]
    pub slower_than: Option<Milliseconds>,
}

impl Named for Mode {
    const NAMES: &[(&str, Self)] = &[
        ("Full", Self::Full),
        ("Headers", Self::Headers),
        ("Off", Self::Off),
    ];
}

/// Whether something is off.
#[derive(Clone, Copy, Debug)]
pub struct Off(bool);

impl Named for Off {
    const NAMES: &[(&str, Self)] = &[("On", Self(false)), ("Off", Self(true))];
}

/// Whether failures only are logged.
#[derive(Clone, Copy, Debug)]
pub struct FailuresOnly(bool);

impl Named for FailuresOnly {
    const NAMES: &[(&str, Self)] = &[("All", Self(false)), ("Failures", Self(true))];
}

/// A line on standard output for each request and each connection that carries no HTTP.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct AccessLogs {
    /// On (default) or Off.
    pub mode: Option<Name<Off>>,
    /// All (default), or Failures only.
    pub matches: Option<Name<FailuresOnly>>,
    /// JSON (default), or a text with the names of fields in braces.
    #[cfg_attr(test, schemars(length(min = 1, max = 2048)))]
    pub format: Option<String>,
}

/// Spans of requests, for a collector.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("x-kubernetes-validations" = crd::rule(
    "(has(self.mode) && self.mode == 'Off') || has(self.provider)",
    "provider is required",
))))]
#[serde(default, rename_all = "camelCase")]
pub struct Tracing {
    /// On (default) or Off.
    pub mode: Option<Name<Off>>,
    /// The collector.
    pub provider: Option<Provider>,
    /// The share of traces. Default: 1 of 100.
    #[cfg_attr(test, schemars(with = "Option<crd::Fraction>"))]
    pub sampling_rate: Option<Fraction>,
    /// The parents of authenticated clients decide, also if this is absent.
    pub parent_based_sampling: Option<ParentBasedSampling>,
    /// Attributes of each span.
    #[cfg_attr(test, schemars(length(max = 16)))]
    pub custom_attributes: Vec<CustomAttribute>,
}

/// The collector.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["endpoint"])))]
#[serde(default, rename_all = "camelCase")]
pub struct Provider {
    /// NAME.NAMESPACE.svc:PORT of a Service of the cluster, which speaks OTLP/gRPC.
    #[cfg_attr(
        test,
        schemars(
            regex(pattern = r"^[-a-z0-9]+\.[-a-z0-9]+\.svc(\.cluster\.local)?:[0-9]{1,5}$"),
            length(max = 160),
        )
    )]
    pub endpoint: String,
}

/// Whether the span of an authenticated client decides.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct ParentBasedSampling {
    /// On (default) or Off.
    pub mode: Option<Name<Off>>,
    /// The share of the requests with a sampled parent. Default: all.
    #[cfg_attr(test, schemars(with = "Option<crd::Fraction>"))]
    pub sampling_rate: Option<Fraction>,
}

/// An attribute of each span.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["name", "type"], "x-kubernetes-validations" = crd::rule(
    "has(self.literalValue) == (self.type == 'Literal') && has(self.headerName) == (self.type == 'Header')",
    "expected literalValue for Literal, headerName for Header",
))))]
#[serde(default, rename_all = "camelCase")]
pub struct CustomAttribute {
    /// The name.
    #[cfg_attr(test, schemars(length(min = 1, max = 256)))]
    pub name: String,
    /// Literal or Header.
    #[serde(rename = "type")]
    #[cfg_attr(test, schemars(extend("enum" = ["Literal", "Header"])))]
    pub kind: String,
    /// The value.
    #[cfg_attr(test, schemars(length(min = 1, max = 256)))]
    pub literal_value: Option<String>,
    /// The field of the request with the value.
    #[cfg_attr(test, schemars(regex(pattern = crd::NAME), length(max = 128)))]
    pub header_name: Option<String>,
}

/// Parses the section of the policy with this name.
pub(super) fn parse(spec: Telemetry, policy: &str) -> Result<Arc<proto::Telemetry>, Rejection> {
    let message = proto::Telemetry {
        name: policy.to_owned(),
        dump: spec.dump.map(dump).transpose()?,
        access_logs: spec.access_logs.map(access_logs),
        tracing: spec.tracing.map(tracing).transpose()?,
    };
    let compiled = Compiled::compile(&message);
    compiled.map_err(|violation| violates("spec.telemetry", &violation))?;
    Ok(Arc::new(message))
}

fn dump(spec: Dump) -> Result<proto::DumpSettings, Rejection> {
    let at = |field: &str| format!("spec.telemetry.dump.{field}");
    let required = || one_of(&at("mode"), Some(""), Mode::NAMES);
    let mode = spec.mode.map_or_else(required, |name| Ok(name.0))?;
    let status = spec.status.as_deref().map(|text| {
        let expected = "a status such as 500, or a class such as 5xx";
        statuses(text).ok_or_else(|| unsupported(&at("status"), text, expected))
    });
    let (min_status, max_status) = status.transpose()?.unwrap_or_default();
    let caller = spec.caller.unwrap_or_default();
    let (namespace, account) = caller.split_once('/').unwrap_or((&caller, ""));
    let is_name = |name: &str| name.is_empty() || is_hostname(name);
    if !is_name(namespace) || !is_name(account) || caller.ends_with('/') || caller.starts_with('/')
    {
        let expected = "a namespace, or NAMESPACE/SERVICE-ACCOUNT";
        return Err(unsupported(&at("caller"), &caller, expected));
    }
    Ok(proto::DumpSettings {
        mode: mode.into(),
        path: spec.path.unwrap_or_default(),
        min_status,
        max_status,
        caller_namespace: namespace.to_owned(),
        caller_service_account: account.to_owned(),
        slower_than: spec.slower_than.unwrap_or_default().0,
    })
}

/// The statuses from "500" on, or of a class, "5xx".
fn statuses(text: &str) -> Option<(u32, u32)> {
    match text.strip_suffix("xx") {
        Some(class) => {
            let first = class.parse::<u32>().ok()?.checked_mul(100)?;
            Some((first, first + 99))
        }
        None => Some((text.parse().ok()?, 599)),
    }
}

fn access_logs(spec: AccessLogs) -> proto::AccessLogs {
    proto::AccessLogs {
        failures: spec.matches.is_some_and(|name| name.0.0),
        format: spec.format.unwrap_or_default(),
        off: is_off(spec.mode),
    }
}

fn tracing(spec: Tracing) -> Result<proto::Tracing, Rejection> {
    let sampling = spec.sampling_rate.unwrap_or(Fraction {
        numerator: 1,
        denominator: None,
    });
    let parent_based = spec.parent_based_sampling.unwrap_or_default();
    let parents = rate(
        "tracing.parentBasedSampling.samplingRate",
        parent_based.sampling_rate.as_ref(),
    )?;
    let attributes = spec.custom_attributes.into_iter().enumerate();
    let attributes = attributes.map(|(position, one)| attribute(position, one));
    let provider = spec.provider.as_ref();
    Ok(proto::Tracing {
        backend: provider.map(backend).transpose()?.unwrap_or_default(),
        sampling: Some(rate("tracing.samplingRate", Some(&sampling))?),
        parent_sampling: (!is_off(parent_based.mode)).then_some(parents),
        attributes: attributes.collect::<Result<_, _>>()?,
        off: is_off(spec.mode),
    })
}

fn is_off(mode: Option<Name<Off>>) -> bool {
    mode.is_some_and(|name| name.0.0)
}

fn rate(field: &str, fraction: Option<&Fraction>) -> Result<proto::Share, Rejection> {
    share(None, fraction, &format!("spec.telemetry.{field}"))
}

/// The collector as a backend: "NAMESPACE/SERVICE:PORT". Only Services of the cluster are: no policy
/// makes proxies connect to other addresses.
fn backend(provider: &Provider) -> Result<String, Rejection> {
    let endpoint = &*provider.endpoint;
    let parsed = || {
        let (host, port) = endpoint.rsplit_once(':')?;
        let port: u16 = port.parse().ok().filter(|port| *port > 0)?;
        let host = host.strip_suffix(".cluster.local").unwrap_or(host);
        let (name, namespace) = host.strip_suffix(".svc")?.split_once('.')?;
        let is_label = |label: &str| !label.contains('.') && is_hostname(label);
        (is_label(name) && is_label(namespace)).then(|| format!("{namespace}/{name}:{port}"))
    };
    parsed().ok_or_else(|| {
        let field = "spec.telemetry.tracing.provider.endpoint";
        let expected = "a Service of the cluster, NAME.NAMESPACE.svc:PORT";
        unsupported(field, endpoint, expected)
    })
}

fn attribute(position: usize, spec: CustomAttribute) -> Result<proto::TraceAttribute, Rejection> {
    let value = match (&*spec.kind, spec.literal_value, spec.header_name) {
        ("Literal", Some(text), None) => Value::Literal(text),
        ("Header", None, Some(name)) => Value::Header(name),
        (kind, ..) => {
            let field = format!("spec.telemetry.tracing.customAttributes[{position}].type");
            let expected = "Literal with a literalValue, or Header with a headerName";
            return Err(unsupported(&field, kind, expected));
        }
    };
    Ok(proto::TraceAttribute {
        name: spec.name,
        value: Some(value),
    })
}
