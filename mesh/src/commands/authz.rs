//! `mesh authz`: tells whether a call to pods, or by them to outside of the cluster, is allowed, by which policy and rule, and why, as the controller
//! or files say, which changes nothing; and commands about policies.

mod forget;
pub(crate) mod generate;

use std::{net::IpAddr, path::PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Args, Subcommand};
use diy_mesh_controller::object::Key;
use diy_mesh_proto::mesh::v1::get_authorization_response::Pod;
use serde_json::{Value, json};

use crate::terminal::{self, Colors, Output, TextStyle, plain};
use crate::{
    authorization::{self, Call, Caller, Claims, Destination, Head, Outcome, Path, Row, Target},
    cluster,
    controller::{self, Controllers},
    files,
};

/// The arguments of `mesh authz`.
#[derive(Args, Debug)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "Exit codes: 0 all pods allow the call, 1 a pod denies it, 2 error, 3 it depends on what is not \
    known, or on an authorization server.\n\n\
    Examples:\n  mesh authz shop/web shop/cart GET /items      a request to the pods of a Service\n  \
    mesh authz shop/web shop/db-0:5432            a connection to a pod that carries no HTTP\n  \
    mesh authz -n shop web cart GET /items        the first one\n  \
    mesh authz unauthenticated shop/cart GET /    a client without mutual TLS\n  \
    mesh authz shop/web shop/greeter POST /hello.Greeter/SayHello   a gRPC call\n  \
    mesh authz shop/web api.example.com:443       by the pods of a Service to outside of the cluster\n  \
    mesh authz shop/web shop/cart GET /items -f manifests/          without a cluster"
)]
pub struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// Client: [NAMESPACE/]SERVICE-ACCOUNT, a SPIFFE ID, or unauthenticated; of a call to outside of
    /// the cluster, [NAMESPACE/]NAME of a Service, a pod or a workload
    #[arg(required = true)]
    from: Option<String>,
    /// Service, pod or workload: [NAMESPACE/]NAME[:PORT]; without PORT, all TCP ports of the Service, or all that
    /// the pod declares. With a dot or a colon in the name: HOST:PORT or ADDRESS:PORT outside of the
    /// cluster
    #[arg(required = true)]
    to: Option<String>,
    /// Method of the request; without it, a connection that carries no HTTP
    #[arg(requires = "path")]
    method: Option<String>,
    /// Path of the request
    #[arg(value_parser = path)]
    path: Option<String>,
    /// Host of the request [default: not known]
    #[arg(long, value_name = "HOST", requires = "method")]
    host: Option<String>,
    /// Header field of the request; repeatable
    #[arg(long, value_name = "NAME=VALUE", value_parser = field, requires = "method")]
    header: Vec<(String, String)>,
    /// Claim of the token of the request, which all issuers accept; VALUE is text or JSON;
    /// repeatable [default: no token]
    #[arg(long, value_name = "NAME=VALUE", value_parser = field, requires = "method")]
    claim: Vec<(String, String)>,
    /// Address of the client, or of the destination HOST [default: not known]
    #[arg(long, value_name = "IP")]
    address: Option<IpAddr>,
    #[command(flatten)]
    source: Source,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// The target of a call.
#[derive(Clone, Debug)]
enum To {
    /// Pods.
    Pods(Target),
    /// A destination outside of the cluster.
    Outside(Destination),
}

impl Arguments {
    async fn caller(&self, from: &str) -> Result<Caller> {
        let caller = match from {
            "unauthenticated" => from.parse(),
            name => self.cluster().full_name(name).await.parse(),
        };
        caller.map_err(|error: String| anyhow!("{from}: {error}"))
    }

    async fn called(&self, to: &str) -> Result<To> {
        let host = to.rsplit_once(':').map_or(to, |(host, _)| host);
        let called = if !to.contains('/') && host.contains(['.', ':']) {
            to.parse().map(To::Outside)
        } else {
            self.cluster().full_name(to).await.parse().map(To::Pods)
        };
        called.map_err(|error: String| anyhow!("{to}: {error}"))
    }

    fn cluster(&self) -> &cluster::Arguments {
        &self.source.controller.cluster
    }
}

/// Other commands about authorization.
#[derive(Debug, Subcommand)]
enum Command {
    /// Give up policies that were deleted with their definition: pods wait for them no longer
    Forget(forget::Arguments),
    /// Write AuthorizationPolicies that allow the calls that were seen
    Generate(generate::Arguments),
}

/// Where policies and pods are read.
#[derive(Args, Debug)]
pub(super) struct Source {
    #[command(flatten)]
    controller: controller::Arguments,
    /// File or folder with objects to read in place of a cluster; a folder counts with its
    /// kustomizations; repeatable
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["context", "controller"])]
    filename: Vec<PathBuf>,
}

impl Source {
    /// The pods of a target.
    async fn pods(&self, target: &Target) -> Result<Vec<Pod>> {
        if self.filename.is_empty() {
            let controllers = Controllers::new(&self.controller).await?;
            let mut controller = controllers.connect().await?;
            let pods = controller.authorization(target.key.to_string(), target.port);
            return pods.await;
        }
        let index = files::index(&self.filename, &self.controller.cluster.mesh_namespace)?;
        let pods = authorization::pods(&index, target);
        pods.with_context(|| {
            format!(
                "the files contain no Service, pod or workload {}",
                target.key
            )
        })
    }
}

/// Parses a path. The query does not count.
pub(super) fn path(text: &str) -> Result<String, String> {
    let path = text.split('?').next().unwrap_or_default();
    if path.starts_with('/') || path == "*" {
        Ok(path.to_owned())
    } else {
        Err("a path begins with /".to_owned())
    }
}

fn field(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Judges a call and prints the verdict.
pub async fn run(arguments: &Arguments) -> Result<Outcome> {
    match (&arguments.command, &arguments.from, &arguments.to) {
        (Some(Command::Forget(arguments)), ..) => forget::run(arguments).await,
        (Some(Command::Generate(arguments)), ..) => generate::run(arguments).await,
        (None, Some(from), Some(to)) => judge(arguments, from, to).await,
        _ => bail!("expected FROM and TO"),
    }
}

async fn judge(arguments: &Arguments, from: &str, to: &str) -> Result<Outcome> {
    let from = &arguments.caller(from).await?;
    let to = &arguments.called(to).await?;
    let target = match to {
        To::Pods(target) => target,
        To::Outside(_) => &caller(arguments, from)?,
    };
    let pods = arguments.source.pods(target).await?;
    ensure!(
        !pods.is_empty(),
        "no pod of the Service {} has a proxy",
        target.key
    );
    let verdicts = verdicts(arguments, from, to, &pods);
    let Some(outcome) = verdicts.iter().map(|(_, verdict, _)| verdict.verdict).max() else {
        bail!(
            "{0} has no such TCP port, or declares none; name one, as {0}:8080",
            target.key
        );
    };
    let rows: Value = verdicts.iter().map(row).collect();
    let output = arguments.output;
    output.print(&rows, |colors| table(&verdicts, colors))?;
    Ok(outcome)
}

/// The pods that call a destination outside of the cluster.
fn caller(arguments: &Arguments, from: &Caller) -> Result<Target> {
    ensure!(
        arguments.method.is_none(),
        "METHOD and PATH: expected none for a call to outside of the cluster"
    );
    match from {
        Caller::Account(namespace, name) => Ok(Target {
            key: Key::new(namespace, name),
            port: 0,
        }),
        _ => bail!(
            "{from}: expected NAMESPACE/NAME of a Service, pod or workload that calls outside of the cluster"
        ),
    }
}

fn verdicts(arguments: &Arguments, from: &Caller, to: &To, pods: &[Pod]) -> Vec<Row> {
    match to {
        To::Pods(_) => authorization::verdicts(pods, &call(arguments, from)),
        To::Outside(destination) => {
            let destination = Destination {
                address: destination.address.or(arguments.address),
                ..destination.clone()
            };
            authorization::outbound_verdicts(pods, &destination)
        }
    }
}

fn call(arguments: &Arguments, from: &Caller) -> Call {
    let head = |(method, path): (&String, &String)| Head {
        method: method.clone(),
        path: Path::Known(path.clone()),
        host: arguments.host.clone(),
        fields: Some(arguments.header.clone()),
        token: claims(&arguments.claim),
    };
    let request = arguments.method.as_ref().zip(arguments.path.as_ref());
    Call {
        caller: from.clone(),
        address: arguments.address,
        request: request.map(head),
    }
}

fn claims(claims: &[(String, String)]) -> Claims {
    let value = |text: &String| serde_json::from_str(text).unwrap_or_else(|_| json!(text));
    let claims = claims
        .iter()
        .map(|(name, text)| (name.clone(), value(text)));
    let claims: serde_json::Map<_, _> = claims.collect();
    if claims.is_empty() {
        Claims::Absent
    } else {
        Claims::Known(claims.into())
    }
}

fn row((port, verdict, pods): &Row) -> Value {
    let mut row = json!(verdict);
    row["port"] = (*port).into();
    row["pods"] = json!(pods);
    row
}

fn table(rows: &[Row], colors: Colors) -> String {
    let headings = ["VERDICT", "POD", "PORT", "REASON", "AUDIT"];
    let mut table = vec![terminal::headings(headings)];
    for (port, verdict, pods) in rows {
        let others = match pods.len() {
            0 | 1 => String::new(),
            number => format!(" and {} more", number - 1),
        };
        let pod = pods.first().map_or("", |pod| pod);
        table.push(vec![
            outcome(verdict.verdict),
            plain(format!("{pod}{others}")),
            plain(port.to_string()),
            plain(verdict.reason.as_str()),
            plain(verdict.audit.as_deref().unwrap_or("-")),
        ]);
    }
    colors.table(&table)
}

pub(super) fn outcome(outcome: Outcome) -> terminal::Cell {
    match outcome {
        Outcome::Allowed => plain("allowed"),
        Outcome::Asks => TextStyle::Warning.cell("asks"),
        Outcome::Unknown => TextStyle::Warning.cell("cannot tell"),
        Outcome::Denied => TextStyle::Error.cell("denied"),
    }
}

#[cfg(test)]
mod tests {
    use std::process::ExitCode;

    use super::*;
    use crate::commands::{block_on, code};

    fn run(arguments: &Arguments) -> ExitCode {
        code(super::run(arguments))
    }

    fn parsed(line: &str) -> Result<Arguments, clap::Error> {
        crate::commands::parsed(line)
    }

    /// With the files of the tutorial.
    fn tutorial(line: &str) -> Arguments {
        let file = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../docs/tutorial/authorization.yaml"
        );
        let samples = concat!(env!("CARGO_MANIFEST_DIR"), "/../manifests/sample-apps");
        parsed(&format!("authz {line} -f {file} -f {samples}")).unwrap()
    }

    /// The printed text, and the exit code.
    fn told(line: &str) -> (String, ExitCode) {
        let arguments = tutorial(line);
        let [from, to] = [&arguments.from, &arguments.to].map(|name| name.as_deref().unwrap());
        let to = to.parse().unwrap();
        let pods = block_on(arguments.source.pods(&to)).unwrap();
        let call = call(&arguments, &from.parse().unwrap());
        let verdicts = authorization::verdicts(&pods, &call);
        (table(&verdicts, Colors::DISABLED), run(&arguments))
    }

    #[test]
    fn verdicts_on_the_pods_of_a_service() {
        let client = "http-client/http-client http-server/http-server";
        let expected = "\
VERDICT  POD                                    PORT  REASON                                             AUDIT
allowed  http-server/http-server-v1 and 1 more  8080  AuthorizationPolicy http-server/readers, rules[0]  -
";
        assert_eq!(
            told(&format!("{client} GET /hello")),
            (expected.to_owned(), ExitCode::SUCCESS)
        );
        let short = |line: &str| run(&tutorial(line));
        let name = "-n http-server http-client/http-client http-server:80";
        assert_eq!(short(&format!("{name} GET /hello")), ExitCode::SUCCESS);
        assert_eq!(short(&format!("{name} POST /hello")), ExitCode::FAILURE);
        let (text, code) = told(&format!("{client} POST /hello"));
        let reason = "no rule matches, the nearest is rules[0] but for its methods";
        assert!(text.contains(reason) && code == ExitCode::FAILURE, "{text}");
    }

    #[test]
    fn arguments_are_checked() {
        for line in [
            "authz",
            "authz shop/web",
            "authz forget",
            "authz forget shop --mesh",
            "authz generate shop",
            "authz generate -n shop --header a=b",
            "authz forget shop -n shop",
            "authz shop/web shop/cart GET",
            "authz shop/web shop/cart GET items",
            "authz shop/web shop/cart --host a",
            "authz shop/web shop/cart GET / --header a",
        ] {
            assert!(parsed(line).is_err(), "{line}");
        }
        for line in [
            "authz shop/web api.example.com",
            "authz shop/web api.example.com:0",
            "authz shop/web/x shop/cart",
        ] {
            assert_eq!(run(&parsed(line).unwrap()), ExitCode::from(2), "{line}");
        }
        let arguments = parsed("authz a/b shop/cart GET /items?x=1 --header a=b=c").unwrap();
        assert_eq!(arguments.path.as_deref(), Some("/items"));
        assert_eq!(arguments.header, [("a".to_owned(), "b=c".to_owned())]);
    }

    #[test]
    fn pods_of_a_service_or_a_pod_call_outside() {
        let file = std::env::temp_dir().join(format!("mesh-authz-{}", std::process::id()));
        let closed = "{apiVersion: diy-service-mesh.dev/v1alpha1, kind: AuthorizationPolicy, \
                      metadata: {name: closed, namespace: http-server}, spec: {targetRefs: \
                      [{kind: Pod, selector: {}}], direction: Outbound, defaultAction: DENY}}";
        std::fs::write(&file, closed).unwrap();
        let samples = concat!(env!("CARGO_MANIFEST_DIR"), "/../manifests/sample-apps");
        let run = |line: &str| {
            let files = format!("-f {} -f {samples}", file.display());
            run(&parsed(&format!("authz {line} {files}")).unwrap())
        };
        let [denied, error] = [ExitCode::FAILURE, ExitCode::from(2)];
        assert_eq!(run("http-server/http-server api.example.com:443"), denied);
        assert_eq!(run("http-server/http-server-v1 192.0.2.1:80"), denied);
        let client = "http-client/http-client api.example.com:443";
        assert_eq!(run(client), ExitCode::SUCCESS);
        assert_eq!(run("http-server/none 192.0.2.1:80"), error);
        assert_eq!(run("unauthenticated 192.0.2.1:80"), error);
        assert_eq!(run(&format!("{client} GET /")), error);
        std::fs::remove_file(file).unwrap();
    }
}
