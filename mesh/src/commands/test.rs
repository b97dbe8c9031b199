//! `mesh test`: runs expectations about calls against manifests, without a cluster. Changes nothing.

use std::{
    collections::BTreeMap,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use diy_mesh_controller::index::Index;
use serde::{Deserialize, Deserializer, de::Error};
use serde_json::{Value, json};

use super::authz;
use crate::terminal::{Colors, Output, TextStyle, plain, printable};
use crate::{
    authorization::{self, Call, Caller, Claims, Head, Outcome, Target, Verdict},
    files,
};

/// The arguments of `mesh test`.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit codes: 0 all calls are as expected, 1 one is not, 2 error.\n\n\
    A file with expectations is a YAML list:\n  \
    - {from: shop/web, to: shop/cart, method: GET, path: /items, expect: allow}\n  \
    - {from: unauthenticated, to: shop/db:5432, expect: deny, policy: shop/db}\n\n\
    Examples:\n  mesh test -f manifests/ -t expectations.yaml\n  \
    mesh test -f manifests/ -t expectations.yaml --junit report.xml"
)]
pub struct Arguments {
    /// File or folder with policies, Services and workloads; repeatable
    #[arg(short, long, value_name = "FILE", required = true)]
    filename: Vec<PathBuf>,
    /// File with expectations; repeatable
    #[arg(short = 't', long, value_name = "FILE", required = true)]
    expectations: Vec<PathBuf>,
    /// File for a report in the format of JUnit
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Namespace of the mesh, whose policies apply to all pods
    #[arg(long, value_name = "NAME", default_value = "service-mesh")]
    mesh_namespace: String,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// The expected outcome of a call to the pods of a target.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Expectation {
    /// For the output. Default: the call.
    name: Option<String>,
    #[serde(deserialize_with = "parsed")]
    from: Caller,
    #[serde(deserialize_with = "text")]
    to: (String, Target),
    method: Option<String>,
    path: Option<String>,
    host: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    /// The claims of a token that all issuers accept. Default: no token.
    claims: Option<serde_json::Map<String, serde_json::Value>>,
    address: Option<IpAddr>,
    expect: Expected,
    /// The policy that decides: NAMESPACE/NAME.
    policy: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Expected {
    Allow,
    Ask,
    Deny,
}

/// The result of an expectation.
struct Tested {
    file: PathBuf,
    name: String,
    result: Result<String, String>,
}

fn parsed<'a, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: FromStr<Err = String>,
    D: Deserializer<'a>,
{
    let text = String::deserialize(deserializer)?;
    text.parse()
        .map_err(|error| D::Error::custom(format!("{text:?}: {error}")))
}

fn text<'a, D: Deserializer<'a>>(deserializer: D) -> Result<(String, Target), D::Error> {
    let text = String::deserialize(deserializer)?;
    let target = text
        .parse()
        .map_err(|error| D::Error::custom(format!("{text:?}: {error}")))?;
    Ok((text, target))
}

/// Runs the expectations and prints the results.
pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let index = files::index(&arguments.filename, &arguments.mesh_namespace)?;
    let mut all = Vec::new();
    for file in &arguments.expectations {
        let expectations = read(file)?.into_iter();
        let tested = expectations.map(|(expectation, call)| Tested {
            file: file.clone(),
            name: expectation.name(),
            result: expectation.judge(&index, &call),
        });
        all.extend(tested);
    }
    if let Some(path) = &arguments.junit {
        let written = fs::write(path, junit(&all));
        written.with_context(|| format!("failed to write {}", path.display()))?;
    }
    let output = arguments.output;
    output.print(&json(&all), |colors| table(&all, colors))?;
    let is_expected = all.iter().all(|tested| tested.result.is_ok());
    Ok(if is_expected {
        Outcome::Allowed
    } else {
        Outcome::Denied
    })
}

fn read(file: &Path) -> Result<Vec<(Expectation, Call)>> {
    let context = || format!("failed to read {}", file.display());
    let text = fs::read_to_string(file).with_context(context)?;
    let all: Vec<Expectation> = serde_yaml_ng::from_str(&text).with_context(context)?;
    let all = all.into_iter().enumerate().map(|(at, expectation)| {
        let call = expectation.call();
        let call = call.with_context(|| format!("{}: [{at}]", file.display()))?;
        Ok((expectation, call))
    });
    all.collect()
}

impl Expectation {
    fn name(&self) -> String {
        let Self {
            from,
            method,
            path,
            to: (to, _),
            ..
        } = self;
        let parts = [method, path].into_iter().flatten();
        let call = parts.fold(format!("{from} to {to}"), |call, part| {
            format!("{call} {part}")
        });
        self.name.clone().unwrap_or(call)
    }

    fn call(&self) -> Result<Call> {
        let request = match (&self.method, &self.path) {
            (None, None) => None,
            (Some(method), Some(path)) => Some(Head {
                method: method.clone(),
                path: authorization::Path::Known(authz::path(path).map_err(anyhow::Error::msg)?),
                host: self.host.clone(),
                fields: Some(self.headers.clone().into_iter().collect()),
                token: self
                    .claims
                    .clone()
                    .map_or(Claims::Absent, |claims| Claims::Known(claims.into())),
            }),
            _ => bail!("method and path belong together"),
        };
        Ok(Call {
            caller: self.from.clone(),
            address: self.address,
            request,
        })
    }

    /// The reason of the verdicts, or why they are not as expected.
    fn judge(&self, index: &Index, call: &Call) -> Result<String, String> {
        let (to, target) = &self.to;
        let pods = authorization::pods(index, target).unwrap_or_default();
        let verdicts = authorization::verdicts(&pods, call);
        let failed = verdicts.iter().find_map(|(port, verdict, pods)| {
            let expected = self.failure(verdict)?;
            let pod = pods.first().map_or("", |pod| pod);
            let (outcome, reason) = (authz::outcome(verdict.verdict).1, &verdict.reason);
            Some(format!(
                "expected {expected}, {outcome} at {pod}:{port}: {reason}"
            ))
        });
        match (failed, verdicts.first()) {
            (Some(failed), _) => Err(failed),
            (None, Some((_, verdict, _))) => Ok(verdict.reason.clone()),
            (None, None) => Err(format!(
                "the files have no pod with a proxy and a port for {to}"
            )),
        }
    }

    /// The expected outcome, if the verdict differs from it.
    fn failure(&self, verdict: &Verdict) -> Option<String> {
        let expected = match self.expect {
            Expected::Allow => Outcome::Allowed,
            Expected::Ask => Outcome::Asks,
            Expected::Deny => Outcome::Denied,
        };
        let policy = self
            .policy
            .as_ref()
            .map(|name| format!("AuthorizationPolicy {name}"));
        if verdict.verdict != expected {
            return Some(authz::outcome(expected).1);
        }
        policy.filter(|policy| verdict.policy.as_ref() != Some(policy))
    }
}

fn table(all: &[Tested], colors: Colors) -> String {
    let row = |tested: &Tested| {
        let (result, reason) = match &tested.result {
            Ok(reason) => (plain("ok"), reason),
            Err(reason) => (TextStyle::Error.cell("FAILED"), reason),
        };
        vec![result, plain(&tested.name), plain(reason)]
    };
    let failed = all.iter().filter(|tested| tested.result.is_err()).count();
    let passed = all.len() - failed;
    let rows: Vec<_> = all.iter().map(row).collect();
    format!("{}{passed} passed, {failed} failed\n", colors.table(&rows))
}

fn json(all: &[Tested]) -> Value {
    let row = |tested: &Tested| {
        let (Ok(reason) | Err(reason)) = &tested.result;
        let (file, name) = (&tested.file, &tested.name);
        json!({"file": file, "name": name, "passed": tested.result.is_ok(), "reason": reason})
    };
    all.iter().map(row).collect()
}

fn junit(all: &[Tested]) -> String {
    let failures = all.iter().filter(|tested| tested.result.is_err()).count();
    let mut report = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites><testsuite name=\"mesh test\" tests=\"{}\" failures=\"{failures}\">\n",
        all.len()
    );
    for Tested { file, name, result } in all {
        let (file, name) = (escaped(&file.to_string_lossy()), escaped(name));
        report += &format!("<testcase classname=\"{file}\" name=\"{name}\">");
        if let Err(failure) = result {
            report += &format!("<failure message=\"{}\"/>", escaped(failure));
        }
        report += "</testcase>\n";
    }
    report + "</testsuite></testsuites>\n"
}

/// A text in an attribute of XML.
fn escaped(text: &str) -> String {
    let text = printable(text).replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;")
        .replace('"', "&quot;")
        .replace('\t', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
    }

    fn tested(expectations: &str) -> Vec<Tested> {
        let files = ["docs/tutorial/authorization.yaml", "manifests/sample-apps"].map(path);
        let index = files::index(&files, "service-mesh").unwrap();
        let all: Vec<Expectation> = serde_yaml_ng::from_str(expectations).unwrap();
        let tested = all.into_iter().map(|one| Tested {
            file: "e.yaml".into(),
            name: one.name(),
            result: one.judge(&index, &one.call().unwrap()),
        });
        tested.collect()
    }

    const EXPECTATIONS: &str = "
- {from: http-client/http-client, to: http-server/http-server, method: GET, path: /hello, expect: allow}
- {from: http-client/http-client, to: http-server/http-server, method: GET, path: /hello, expect: deny}
- {name: a <call>, from: unauthenticated, to: 'grpc-server/grpc-server:80', expect: deny, policy: grpc-server/nobody}
- {from: unauthenticated, to: grpc-server/grpc-server, expect: deny, policy: grpc-server/other}
- {from: unauthenticated, to: grpc-server/none, expect: deny}
";

    #[test]
    fn each_expectation_has_a_line_with_the_reason() {
        let expected = "\
ok      http-client/http-client to http-server/http-server GET /hello  AuthorizationPolicy http-server/readers, rules[0]
FAILED  http-client/http-client to http-server/http-server GET /hello  expected denied, allowed at http-server/http-server-v1:8080: AuthorizationPolicy http-server/readers, rules[0]
ok      a <call>                                                       AuthorizationPolicy grpc-server/nobody: no rule matches
FAILED  unauthenticated to grpc-server/grpc-server                     expected AuthorizationPolicy grpc-server/other, denied at grpc-server/grpc-server:8080: AuthorizationPolicy grpc-server/nobody: no rule matches
FAILED  unauthenticated to grpc-server/none                            the files have no pod with a proxy and a port for grpc-server/none
2 passed, 3 failed
";
        assert_eq!(table(&tested(EXPECTATIONS), Colors::DISABLED), expected);
    }

    #[test]
    fn question_to_a_server_can_be_expected() {
        let expectation = |expect: &str| {
            let text = format!("{{from: a/b, to: shop/cart, expect: {expect}, policy: shop/p}}");
            serde_yaml_ng::from_str::<Expectation>(&text).unwrap()
        };
        let asks = Verdict {
            verdict: Outcome::Asks,
            reason: String::new(),
            policy: Some("AuthorizationPolicy shop/p".to_owned()),
            rule: None,
            field: None,
            audit: None,
        };
        assert_eq!(expectation("ask").failure(&asks), None);
        let others = ["allow", "deny"].map(|expect| expectation(expect).failure(&asks));
        assert_eq!(
            others,
            ["allowed", "denied"].map(|word| Some(word.to_owned()))
        );
    }

    #[test]
    fn report_is_xml() {
        let report = junit(&tested(EXPECTATIONS)[2..]);
        let expected = "\
<?xml version=\"1.0\" encoding=\"UTF-8\"?>
<testsuites><testsuite name=\"mesh test\" tests=\"3\" failures=\"2\">
<testcase classname=\"e.yaml\" name=\"a &lt;call&gt;\"></testcase>
";
        assert!(report.starts_with(expected), "{report}");
        assert!(report.ends_with("</testcase>\n</testsuite></testsuites>\n"));
    }

    #[test]
    fn expectations_are_checked() {
        for wrong in [
            "{from: shop, to: shop/cart, expect: allow}",
            "{from: a/b, to: cart, expect: allow}",
            "{from: a/b, to: shop/cart, expect: maybe}",
            "{from: a/b, to: shop/cart, expect: allow, pth: /}",
            "{from: a/b, to: shop/cart}",
        ] {
            let read: Result<Expectation, _> = serde_yaml_ng::from_str(wrong);
            assert!(read.is_err(), "{wrong}");
        }
        for wrong in ["method: GET", "path: /", "method: GET, path: items"] {
            let text = format!("{{from: a/b, to: shop/cart, expect: allow, {wrong}}}");
            let read: Expectation = serde_yaml_ng::from_str(&text).unwrap();
            assert!(read.call().is_err(), "{wrong}");
        }
    }
}
