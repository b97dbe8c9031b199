//! The telemetry of a proxy about the traffic of its pod: dumps, access logs and traces. The
//! controller rejects a policy with an invalid value, and the proxy applies the others: both
//! compile it here.

use std::time::Duration;

use diy_mesh_model::access::Format;
use diy_mesh_model::identity::Identity;

use crate::mesh::v1 as proto;
use crate::policy::{Violation, check_name, check_share, duration, violation};
pub use proto::dump_settings::Mode;
use proto::trace_attribute::Value;

/// Attributes of spans that a policy has.
pub const MAX_ATTRIBUTES: usize = 16;
/// The length of the name or the literal value of an attribute, and of a path.
pub const MAX_TEXT_BYTES: usize = 256;

/// The telemetry of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Telemetry {
    /// The policy, for logs.
    pub name: String,
    /// The dump settings, or `None` for the proxy's arguments.
    pub dump: Option<DumpSettings>,
    /// The access logs, or `None` without access logs.
    pub access_logs: Option<AccessLogs>,
    /// The traces, or `None` without traces.
    pub tracing: Option<Tracing>,
}

/// Which exchanges and opaque connections are dumped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DumpSettings {
    /// How.
    pub mode: Mode,
    /// The conditions, all of which hold.
    pub filter: DumpFilter,
}

/// Conditions on what is dumped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DumpFilter {
    /// The path begins with these elements, without a slash at their end.
    pub path: Option<String>,
    /// The status of the response.
    pub status: Option<(u16, u16)>,
    /// The namespace and the service account of the caller. Empty: each one.
    pub caller: Option<(String, String)>,
    /// The time that it takes at least.
    pub slower_than: Option<Duration>,
}

/// The exchanges and opaque connections with a line in the access log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessLogs {
    /// Only what failed.
    pub failures: bool,
    /// Its form.
    pub format: Format,
}

/// Which requests have spans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tracing {
    /// The collector: "NAMESPACE/SERVICE:PORT".
    pub backend: String,
    /// The share of traces.
    pub sampling: Ratio,
    /// The share of the traces with a sampled parent, or `None` if parents do not count.
    pub parent_sampling: Option<Ratio>,
    /// Attributes of each span.
    pub attributes: Vec<(String, AttributeValue)>,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttributeValue {
    /// The same for each span.
    Literal(String),
    /// The value of this field of the request.
    Header(String),
}

/// A share of all traces, which every proxy draws alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ratio(u64);

/// The random bits of a trace id (W3C Trace Context, level 2).
const RANDOM_BITS: u32 = 56;

impl Ratio {
    fn of(share: proto::Share) -> Self {
        let whole = u128::from(share.numerator) << RANDOM_BITS;
        let ratio = whole / u128::from(share.denominator.max(1));
        Self(u64::try_from(ratio).unwrap_or(u64::MAX))
    }

    /// Whether the trace is in the share. A larger share has all traces of a smaller one.
    pub fn includes(self, trace: &[u8; 16]) -> bool {
        let [.., a, b, c, d, e, f, g] = *trace;
        let random = u64::from_be_bytes([0, a, b, c, d, e, f, g]);
        random + self.0 >= 1 << RANDOM_BITS
    }
}

impl DumpFilter {
    /// Whether a path, without its query, is one of those.
    pub fn has_path(&self, path: &[u8]) -> bool {
        self.path.as_ref().is_none_or(|prefix| {
            let rest = path.strip_prefix(prefix.as_bytes());
            rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'/')))
        })
    }

    /// Whether a caller is one of those.
    pub fn has_caller(&self, caller: Option<&Identity>) -> bool {
        self.caller.as_ref().is_none_or(|(namespace, account)| {
            caller.is_some_and(|caller| {
                caller.namespace() == namespace
                    && (account.is_empty() || caller.service_account() == account)
            })
        })
    }

    /// Whether the result is one of those.
    pub fn has_result(&self, status: Option<u16>, time: Duration) -> bool {
        let has_status = |(min, max)| status.is_some_and(|status| (min..=max).contains(&status));
        self.status.is_none_or(has_status) && self.slower_than.is_none_or(|least| time >= least)
    }

    /// Whether conditions are about requests only.
    pub fn requires_http(&self) -> bool {
        self.path.is_some() || self.status.is_some()
    }
}

impl Telemetry {
    /// Compiles the message. Fails if it has a value that this release does not know.
    pub fn compile(message: &proto::Telemetry) -> Result<Self, Violation> {
        let access_logs = message.access_logs.as_ref().filter(|logs| !logs.off);
        let tracing = message.tracing.as_ref().filter(|tracing| !tracing.off);
        Ok(Self {
            name: message.name.clone(),
            dump: message.dump.as_ref().map(compile_dump).transpose()?,
            access_logs: access_logs.map(compile_access_logs).transpose()?,
            tracing: tracing.map(compile_tracing).transpose()?,
        })
    }
}

fn compile_dump(message: &proto::DumpSettings) -> Result<DumpSettings, Violation> {
    let mode = match Mode::try_from(message.mode) {
        Ok(mode @ (Mode::Full | Mode::Headers | Mode::Off)) => mode,
        _ => return Err(violation("dump.mode", message.mode, "Full, Headers or Off")),
    };
    let path = &*message.path;
    let is_path = path.starts_with('/') && path.len() <= MAX_TEXT_BYTES;
    if !path.is_empty() && !is_path {
        let expected = "a path of at most 256 bytes, which begins with /";
        return Err(violation("dump.path", path, expected));
    }
    let (min, max) = (message.min_status, message.max_status);
    let is_range = (100..=599).contains(&min) && (min..=599).contains(&max);
    if (min, max) != (0, 0) && !is_range {
        let expected = "a status from 100 to 599, or a class such as 5xx";
        return Err(violation("dump.status", format!("{min}-{max}"), expected));
    }
    let least = Some(message.slower_than).filter(|least| *least > 0);
    duration("dump.slowerThan", least)?;
    let status = |status| u16::try_from(status).unwrap_or(u16::MAX);
    let namespace = &message.caller_namespace;
    let caller = (namespace.clone(), message.caller_service_account.clone());
    let filter = DumpFilter {
        path: (!path.is_empty()).then(|| path.trim_end_matches('/').to_owned()),
        status: is_range.then(|| (status(min), status(max))),
        caller: (!namespace.is_empty()).then_some(caller),
        slower_than: least.map(Duration::from_millis),
    };
    Ok(DumpSettings { mode, filter })
}

fn compile_access_logs(message: &proto::AccessLogs) -> Result<AccessLogs, Violation> {
    let format = Format::parse(&message.format).map_err(|error| {
        violation(
            "accessLogs.format",
            &message.format,
            &format!("valid: {error}"),
        )
    })?;
    Ok(AccessLogs {
        failures: message.failures,
        format,
    })
}

fn compile_tracing(message: &proto::Tracing) -> Result<Tracing, Violation> {
    if message.backend.is_empty() {
        return Err(violation("tracing.provider", "", "set"));
    }
    check_share("tracing.samplingRate", message.sampling)?;
    if message.parent_sampling.is_some() {
        let field = "tracing.parentBasedSampling.samplingRate";
        check_share(field, message.parent_sampling)?;
    }
    let attributes = message.attributes.iter().map(attribute);
    let attributes = attributes.collect::<Result<Vec<_>, _>>()?;
    if attributes.len() > MAX_ATTRIBUTES {
        let field = "tracing.customAttributes";
        return Err(violation(
            field,
            attributes.len(),
            "a list of at most 16 attributes",
        ));
    }
    Ok(Tracing {
        backend: message.backend.clone(),
        sampling: Ratio::of(message.sampling.unwrap_or_default()),
        parent_sampling: message.parent_sampling.map(Ratio::of),
        attributes,
    })
}

fn attribute(message: &proto::TraceAttribute) -> Result<(String, AttributeValue), Violation> {
    let is_text = |text: &str| (1..=MAX_TEXT_BYTES).contains(&text.len());
    if !is_text(&message.name) {
        let field = "tracing.customAttributes.name";
        return Err(violation(field, &message.name, "a text of 1 to 256 bytes"));
    }
    let value = match &message.value {
        Some(Value::Literal(text)) if is_text(text) => AttributeValue::Literal(text.clone()),
        Some(Value::Header(name)) => {
            check_name("tracing.customAttributes.headerName", name)?;
            AttributeValue::Header(name.clone())
        }
        _ => {
            let expected = "a literalValue of 1 to 256 bytes, or a headerName";
            return Err(violation("tracing.customAttributes", "", expected));
        }
    };
    Ok((message.name.clone(), value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dumped(settings: proto::DumpSettings) -> Result<DumpSettings, String> {
        let message = proto::Telemetry {
            dump: Some(settings),
            ..proto::Telemetry::default()
        };
        let compiled = Telemetry::compile(&message);
        let dump = compiled.map(|telemetry| telemetry.dump.expect("settings"));
        dump.map_err(|violation| violation.to_string())
    }

    #[test]
    fn filters_have_paths_by_elements_statuses_callers_and_times() {
        let settings = proto::DumpSettings {
            mode: Mode::Headers.into(),
            path: "/shop/".into(),
            min_status: 500,
            max_status: 599,
            caller_namespace: "shop".into(),
            slower_than: 20,
            ..proto::DumpSettings::default()
        };
        let filter = dumped(settings.clone()).unwrap().filter;
        for (path, expected) in [("/shop", true), ("/shop/a", true), ("/shopping", false)] {
            assert_eq!(filter.has_path(path.as_bytes()), expected, "{path}");
        }
        let result = |status, ms| filter.has_result(status, Duration::from_millis(ms));
        assert!(result(Some(503), 20) && !result(Some(503), 19));
        assert!(!result(Some(499), 20) && !result(None, 20));
        let web: Identity = "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap();
        assert!(filter.has_caller(Some(&web)) && !filter.has_caller(None));
        let other = dumped(proto::DumpSettings {
            caller_service_account: "cart".into(),
            path: "/".into(),
            ..settings
        });
        let other = other.unwrap().filter;
        assert!(!other.has_caller(Some(&web)) && other.has_path(b"/") && other.has_path(b"/a"));
    }

    #[test]
    fn names_the_field_the_value_and_the_permitted_values() {
        let mode = |mode: i32| proto::DumpSettings {
            mode,
            ..proto::DumpSettings::default()
        };
        let error = |settings| dumped(settings).unwrap_err();
        assert_eq!(
            error(mode(7)),
            "dump.mode: \"7\" is not Full, Headers or Off"
        );
        let range = |min_status, max_status| proto::DumpSettings {
            min_status,
            max_status,
            ..mode(1)
        };
        for (min, max) in [(99, 599), (500, 600), (500, 499), (0, 5), (5, 0)] {
            assert!(error(range(min, max)).starts_with("dump.status"), "{min}");
        }
        let path = "shop".to_owned();
        let relative = proto::DumpSettings { path, ..mode(1) };
        assert!(error(relative).starts_with("dump.path: \"shop\" is not a path"));
        let long = proto::DumpSettings {
            slower_than: u64::MAX,
            ..mode(1)
        };
        assert!(error(long).contains("is not from 1ms to 24h"));
        let message = proto::Telemetry {
            access_logs: Some(proto::AccessLogs {
                format: "{user}".into(),
                ..proto::AccessLogs::default()
            }),
            ..proto::Telemetry::default()
        };
        let error = Telemetry::compile(&message).unwrap_err().to_string();
        let expected = "accessLogs.format: \"{user}\" is not valid: {user} is not a field; the";
        assert!(error.starts_with(expected), "{error}");
    }

    fn traced(message: proto::Tracing) -> Result<Tracing, String> {
        let message = proto::Telemetry {
            tracing: Some(proto::Tracing {
                backend: "o11y/otel:4317".into(),
                ..message
            }),
            ..proto::Telemetry::default()
        };
        let compiled = Telemetry::compile(&message);
        let tracing = compiled.map(|telemetry| telemetry.tracing.expect("tracing"));
        tracing.map_err(|violation| violation.to_string())
    }

    fn share(numerator: u32, denominator: u32) -> Option<proto::Share> {
        Some(proto::Share {
            numerator,
            denominator,
        })
    }

    #[test]
    fn a_larger_share_has_all_traces_of_a_smaller_one() {
        let ratio = |numerator, denominator| {
            let message = proto::Tracing {
                sampling: share(numerator, denominator),
                ..proto::Tracing::default()
            };
            traced(message).unwrap().sampling
        };
        let mut rng = fastrand::Rng::with_seed(7);
        let traces: Vec<[u8; 16]> = (0..10_000).map(|_| rng.u128(..).to_be_bytes()).collect();
        let count = |ratio: Ratio| traces.iter().filter(|one| ratio.includes(one)).count();
        assert_eq!((count(ratio(0, 1)), count(ratio(1, 1))), (0, 10_000));
        let tenth = ratio(10, 100);
        assert!((900..1100).contains(&count(tenth)));
        let is_in_larger = |one: &&[u8; 16]| !tenth.includes(one) || ratio(1, 5).includes(one);
        assert!(traces.iter().all(|one| is_in_larger(&one)));
        assert!(ratio(1, 1).includes(&[0; 16]) && !ratio(0, 1).includes(&[0xff; 16]));
    }

    #[test]
    fn what_is_off_is_absent() {
        let message = proto::Telemetry {
            access_logs: Some(proto::AccessLogs {
                off: true,
                ..proto::AccessLogs::default()
            }),
            tracing: Some(proto::Tracing {
                off: true,
                ..proto::Tracing::default()
            }),
            ..proto::Telemetry::default()
        };
        assert_eq!(Telemetry::compile(&message), Ok(Telemetry::default()));
    }

    #[test]
    fn traces_have_a_share_of_at_most_one_and_bounded_attributes() {
        let attribute = |name: &str, value| proto::TraceAttribute {
            name: name.into(),
            value,
        };
        let valid = |attributes: Vec<proto::TraceAttribute>| {
            let sampling = share(1, 100);
            let message = proto::Tracing {
                sampling,
                attributes,
                ..proto::Tracing::default()
            };
            traced(message).is_ok()
        };
        let literal = Some(Value::Literal("production".into()));
        assert!(valid(vec![attribute("env", literal.clone()); 16]));
        assert!(!valid(vec![attribute("env", literal.clone()); 17]));
        for wrong in [
            attribute("", literal),
            attribute("env", None),
            attribute("env", Some(Value::Literal(String::new()))),
            attribute("env", Some(Value::Literal("a".repeat(257)))),
            attribute("env", Some(Value::Header("a b".into()))),
        ] {
            assert!(!valid(vec![wrong.clone()]), "{wrong:?}");
        }
        for wrong in [None, share(2, 1), share(0, 0)] {
            let message = proto::Tracing {
                sampling: wrong,
                ..proto::Tracing::default()
            };
            assert!(traced(message).is_err(), "{wrong:?}");
        }
    }
}
