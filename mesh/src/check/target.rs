//! The checks of `mesh upgrade --check`: whether the mesh of a cluster can become the release of
//! this program. Their facts are the facts of `mesh check`, and the answers of the API server about
//! the new objects.

use diy_mesh_controller::object::fields::paths;
use std::collections::BTreeSet;

use diy_mesh_injector::version::numbers;
use futures::future::join_all;
use kube::{ResourceExt, api::ListParams};
use serde_json::{Value, json};

use super::facts::{Fact, Facts};
use super::policies::{self, fields, of_same_kind};
use super::{Finding, Findings, count, or_ok, platform, report, upgrade};
use crate::{
    cluster::{Cluster, FORBIDDEN, list},
    identity::status::{Workload, workload_name},
    install::{self, live},
    routes::text,
};

/// The number of releases before this one whose components work with the components of this
/// release.
const SUPPORTED_RELEASES: u32 = 2;
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The answers of the API server about the objects of an upgrade.
pub struct Target {
    /// The objects that it would reject, with its reasons.
    pub rejected: Vec<String>,
    /// Why it could not be asked about others.
    pub unknown: Vec<String>,
    /// Objects of the mesh that are not in the upgrade, and stay.
    pub left: Fact<Vec<String>>,
}

impl Target {
    /// Asks the API server, in dry runs.
    pub async fn gather(cluster: &Cluster, objects: &[Value]) -> Self {
        let all = [&install::definitions(), objects].concat();
        let ask = async |object: &Value| {
            let result = live::dry_run(&cluster.client, object).await;
            result.map_err(|error| format!("{}: {error}", live::title(object)))
        };
        let errors = join_all(all.iter().map(ask)).await;
        let errors = errors.into_iter().filter_map(Result::err);
        let (unknown, rejected) = errors.partition(|error| error.contains(FORBIDDEN));
        Self {
            rejected,
            unknown,
            left: left(cluster, objects).await,
        }
    }
}

/// The objects with the label of the mesh, of the kinds of these objects, that are not among them.
async fn left(cluster: &Cluster, objects: &[Value]) -> Fact<Vec<String>> {
    let titles: BTreeSet<String> = objects.iter().map(live::title).collect();
    let label = format!("{}={}", live::LABEL.0, live::LABEL.1);
    let labelled = ListParams::default().labels(&label);
    let mut left = BTreeSet::new();
    let mut kinds = BTreeSet::new();
    for object in objects {
        if !kinds.insert(object["kind"].as_str()) {
            continue;
        }
        let api = live::api(&cluster.client, object).await?;
        for found in list(api, &labelled).await? {
            let title = live::title(&json!({"kind": object["kind"], "metadata": found.metadata}));
            if found.owner_references().is_empty() && !titles.contains(&title) {
                left.insert(title);
            }
        }
    }
    Ok(left.into_iter().collect())
}

/// Runs the checks of an upgrade.
pub fn run(facts: &Facts, target: &Target) -> Vec<Finding> {
    report([
        ("kubernetes", platform::kubernetes(facts)),
        ("control-plane", control_plane(facts)),
        ("proxies", proxies(facts)),
        ("policy-definition", policies::definition(facts)),
        ("removed-fields", removed_fields(facts)),
        ("judgement", upgrade::upgrade(facts)),
        ("objects", objects(target)),
        ("left", left_behind(target)),
    ])
}

/// How a version is related to an upgrade to this release.
#[derive(Debug, PartialEq, Eq)]
enum Skew {
    Supported,
    TooOld,
    Newer,
    /// No version, such as the tag `dev`.
    Unknown,
}

fn skew(version: &str) -> Skew {
    match [VERSION, version].map(|version| numbers(version).try_into()) {
        [Ok(own), Ok(other)] => relation(own, other),
        _ => Skew::Unknown,
    }
}

/// How another release is related to an upgrade to this one.
fn relation(own: [u32; 3], other: [u32; 3]) -> Skew {
    if other > own {
        Skew::Newer
    } else if other[0] != own[0] || other[1] + SUPPORTED_RELEASES < own[1] {
        Skew::TooOld
    } else {
        Skew::Supported
    }
}

/// Findings about components of other releases, given as pairs of name and version.
fn skewed(components: &[(String, String)], remedy: &str, ok: String) -> Vec<Finding> {
    let of = |expected: Skew| {
        let found = components
            .iter()
            .filter(|(_, version)| skew(version) == expected);
        let found = found.map(|(name, version)| format!("{name}: {version}"));
        found.collect::<Vec<_>>()
    };
    let text = format!("more than {SUPPORTED_RELEASES} releases older than {VERSION}");
    let too_old = Finding::problem(text, remedy).if_any(of(Skew::TooOld));
    let text = format!("newer than {VERSION}: this would be a downgrade");
    let advice = "use the mesh program of the newer release";
    let newer = Finding::problem(text, advice).if_any(of(Skew::Newer));
    let text = format!("no versions, so they cannot be compared with {VERSION}");
    let unknown = Finding::note(text, "").if_any(of(Skew::Unknown));
    or_ok([too_old, newer, unknown], ok)
}

/// The releases of the controller and the injector, by the tags of their images.
fn control_plane(facts: &Facts) -> Findings<'_> {
    let deployments = facts.deployments.as_ref()?;
    let images = ["controller", "injector"].map(|name| {
        let image = platform::container(deployments, name)?.image.as_deref()?;
        Some((name.to_owned(), platform::tag(image).to_owned()))
    });
    let images: Vec<_> = images.into_iter().flatten().collect();
    if images.is_empty() {
        let text = format!("no mesh in namespace {}", facts.namespace);
        let advice = "set its namespace with --mesh-namespace, or install the mesh: mesh install | kubectl apply -f -";
        return Ok(vec![Finding::problem(text, advice)]);
    }
    let remedy = "upgrade in steps of at most two releases";
    let ok = format!("controller and injector can be upgraded to {VERSION}");
    Ok(skewed(&images, remedy, ok))
}

/// The releases of the proxies, as they tell the controllers.
fn proxies(facts: &Facts) -> Findings<'_> {
    let workloads = &facts.identity.as_ref()?.workloads;
    let version = |one: &Workload| (workload_name(one), one.proxy_version.clone());
    let proxies: Vec<_> = workloads.iter().map(version).collect();
    let remedy = "restart the workloads of these pods before the upgrade: kubectl rollout restart";
    let number = count(proxies.len(), "connected proxy", "connected proxies");
    let ok = format!(
        "{number} can stay during the upgrade; a restart of a workload upgrades its proxies"
    );
    Ok(skewed(&proxies, remedy, ok))
}

/// Stored versions and fields that the definitions of this release no longer have.
fn removed_fields(facts: &Facts) -> Findings<'_> {
    let installed = facts.definitions.as_ref()?;
    let policies = facts.policies.as_ref()?;
    let (mut versions, mut used, mut unused) = (Vec::new(), Vec::new(), Vec::new());
    for own in install::definitions() {
        let Some(installed) = of_same_kind(&own, installed) else {
            continue;
        };
        let name = text(&own["spec"]["names"]["kind"]);
        let served = |version: &Value| {
            let mut all = own["spec"]["versions"].as_array().into_iter().flatten();
            all.any(|one| one["name"] == *version)
        };
        let stored = installed["status"]["storedVersions"].as_array();
        let stored = stored.into_iter().flatten();
        let stored = stored.filter(|version| !served(version));
        versions.extend(stored.map(|version| format!("{name}: {version}")));
        for field in fields(installed).difference(&fields(&own)) {
            let users = policies.iter().filter(|one| one["kind"] == *name);
            let users: Vec<String> = users
                .filter(|one| paths(one).contains(field))
                .map(live::title)
                .collect();
            match &users[..] {
                [] => unused.push(format!("{name}: {field}")),
                users => used.push(format!("{name}: {field}: {}", users.join(", "))),
            }
        }
    }
    let text = "versions of stored policies that this release does not have";
    let advice = "upgrade to a release with both versions first";
    let versions = Finding::problem(text, advice).if_any(versions);
    let text = "policies have fields that this release does not have";
    let advice = "change these policies before the upgrade: the API server would drop the fields";
    let used = Finding::problem(text, advice).if_any(used);
    let text = "this release does not have fields that no policy has";
    let unused = Finding::note(text, "").if_any(unused);
    Ok(or_ok(
        [versions, used, unused],
        "this release has all fields of the installed definitions".into(),
    ))
}

/// The API server accepts the objects.
fn objects(target: &Target) -> Findings<'static> {
    let text = "objects that the API server would reject";
    let advice = "if a field is immutable, delete the object before the upgrade";
    let rejected = Finding::problem(text, advice).if_any(target.rejected.clone());
    let text = "objects that you may not change";
    let unknown = Finding::note(text, "").if_any(target.unknown.clone());
    let text = "the API server would accept all objects; kubectl diff shows the changes";
    Ok(or_ok([rejected, unknown], text.to_owned()))
}

/// Objects of earlier releases, which `kubectl apply` does not delete.
fn left_behind(target: &Target) -> Findings<'_> {
    let left = target.left.as_ref()?;
    let text = "objects with the label of the mesh that this release does not have";
    let advice = "delete them after the upgrade, if they are of an earlier release";
    let left = Finding::warning(text, advice).if_any(left.clone());
    Ok(or_ok([left], "no objects of earlier releases".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::super::{
        Level,
        facts::testing::{deployment, unknown_facts},
    };
    use super::*;
    use crate::identity::status::Mesh;

    fn levels(findings: &[Finding]) -> Vec<Level> {
        findings.iter().map(|finding| finding.level).collect()
    }

    #[test]
    fn two_releases_before_this_one_are_supported() {
        let [major, minor] = [
            env!("CARGO_PKG_VERSION_MAJOR"),
            env!("CARGO_PKG_VERSION_MINOR"),
        ];
        assert_eq!(skew(VERSION), Skew::Supported);
        assert_eq!(skew(&format!("v{major}.{minor}.0")), Skew::Supported);
        assert_eq!(skew(&format!("{major}.{minor}.999")), Skew::Newer);
        assert_eq!(relation([0, 5, 0], [0, 3, 9]), Skew::Supported);
        assert_eq!(relation([0, 5, 0], [0, 2, 9]), Skew::TooOld);
        assert_eq!(relation([1, 0, 0], [0, 9, 0]), Skew::TooOld);
        assert_eq!(relation([0, 5, 0], [0, 5, 1]), Skew::Newer);
        for tag in ["dev", "sha256:00", "latest", "1.0", ""] {
            assert_eq!(skew(tag), Skew::Unknown, "{tag}");
        }
    }

    #[test]
    fn newer_proxies_are_named() {
        let workload = |pod: &str, proxy_version: &str| Workload {
            namespace: "shop".into(),
            pod: pod.into(),
            proxy_version: proxy_version.into(),
            ..Workload::default()
        };
        let facts = |workloads| Facts {
            identity: Ok(Mesh {
                workloads,
                ..Mesh::default()
            }),
            ..unknown_facts()
        };
        let current = vec![workload("a", VERSION)];
        assert_eq!(levels(&proxies(&facts(current)).unwrap()), [Level::Ok]);
        let newer = facts(vec![workload("a", VERSION), workload("b", "999.0.0")]);
        let found = proxies(&newer).unwrap();
        assert_eq!(levels(&found), [Level::Problem]);
        assert_eq!(found[0].details, ["shop/b: 999.0.0"]);
        // A proxy tells its version itself.
        let hostile = format!("\u{1b}[2Jno problems found\n{}", "9".repeat(100_000));
        let hostile = facts(vec![workload("c", &hostile)]);
        let detail = &proxies(&hostile).unwrap()[0].details[0];
        assert!(detail.starts_with("shop/c: \\x1b[2Jno"), "{detail}");
        assert!(detail.len() < 3000 && !detail.contains('\n'), "{detail}");
    }

    #[test]
    fn missing_control_plane_and_tags_that_are_no_versions_are_reported() {
        let facts = |deployments| Facts {
            deployments: Ok(deployments),
            ..unknown_facts()
        };
        assert_eq!(
            levels(&control_plane(&facts(vec![])).unwrap()),
            [Level::Problem]
        );
        let dev = ["controller", "injector"].map(|name| deployment(name, 2, json!([])));
        assert_eq!(
            levels(&control_plane(&facts(dev.into())).unwrap()),
            [Level::Note]
        );
    }

    #[test]
    fn fields_that_policies_lose_are_problems() {
        let mut installed = install::definitions();
        let check = |installed: &[Value], policies: Vec<Value>| {
            let facts = Facts {
                definitions: Ok(installed.to_vec()),
                policies: Ok(policies),
                ..unknown_facts()
            };
            removed_fields(&facts).unwrap()
        };
        assert_eq!(levels(&check(&installed, vec![])), [Level::Ok]);
        let traffic = &mut installed[1];
        traffic["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
            ["former"] = json!({"type": "array", "items": {"properties": {"x": {}}}});
        assert_eq!(levels(&check(&installed, vec![])), [Level::Note]);
        let policy = json!({"kind": "TrafficPolicy", "metadata": {"namespace": "shop", "name": "web"},
            "spec": {"former": [{"x": 1}]}});
        let found = check(&installed, vec![policy]);
        assert_eq!(levels(&found), [Level::Problem]);
        let detail = "TrafficPolicy: spec.former[].x: TrafficPolicy shop/web";
        assert!(found[0].details.contains(&detail.to_owned()), "{found:?}");
        installed[0]["status"] = json!({"storedVersions": ["v1alpha0"]});
        assert_eq!(check(&installed, vec![])[0].level, Level::Problem);
    }

    #[test]
    fn rejected_objects_are_problems_and_forbidden_ones_are_not() {
        let target = |rejected: &[&str], unknown: &[&str]| Target {
            rejected: rejected.iter().map(|&text| text.into()).collect(),
            unknown: unknown.iter().map(|&text| text.into()).collect(),
            left: Ok(vec!["Role mesh/former".into()]),
        };
        assert_eq!(levels(&objects(&target(&[], &[])).unwrap()), [Level::Ok]);
        assert_eq!(
            levels(&objects(&target(&["x: immutable"], &[])).unwrap()),
            [Level::Problem]
        );
        assert_eq!(
            levels(&objects(&target(&[], &["x: forbidden: y"])).unwrap()),
            [Level::Note]
        );
        let found = target(&[], &[]);
        assert_eq!(levels(&left_behind(&found).unwrap()), [Level::Warning]);
    }
}
