//! Tests of the objects, the values and the chart.

use std::collections::BTreeSet;

use super::*;
use crate::yaml;

mod chart;

fn load(assignments: &[&str]) -> anyhow::Result<Values> {
    let assignments: Vec<String> = assignments.iter().map(|&text| text.into()).collect();
    Values::load(&[], &assignments)
}

fn object<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let mut all = objects.iter();
    let found = all.find(|one| one["kind"] == kind && one["metadata"]["name"] == name);
    found.expect("the object exists")
}

#[test]
fn defaults_give_the_manifests() {
    let values = load(&[]).unwrap();
    assert_eq!(objects(&values), manifests());
}

#[test]
fn every_value_has_a_place_in_the_manifests() {
    let places = places(&manifests());
    let found: BTreeSet<&str> = places.iter().map(|place| place.value).collect();
    let texts = TEXTS.iter().map(|(value, ..)| *value);
    let listed: BTreeSet<&str> = texts.chain(FIELDS.iter().map(|row| row.0)).collect();
    assert_eq!(found, listed);
    // The injector has the trust domain too.
    assert_eq!(
        places
            .iter()
            .filter(|one| one.value == "trustDomain")
            .count(),
        2
    );
    // These make the complete references of images.
    let mut parts = BTreeSet::from(["redirect", "image.registry", "image.tag"].map(String::from));
    parts.extend(found.iter().map(|&value| value.to_owned()));
    assert_eq!(paths(&values::schema(), ""), parts);
}

/// The paths of values in a schema, of resources as a whole.
fn paths(schema: &Value, parent: &str) -> BTreeSet<String> {
    let properties = schema["properties"].as_object().unwrap().iter();
    let properties = properties.filter(|(name, _)| *name != "global");
    let nested = properties.map(|(name, property)| {
        if property["properties"].is_object() && name != "resources" {
            paths(property, &format!("{parent}{name}."))
        } else {
            BTreeSet::from([format!("{parent}{name}")])
        }
    });
    nested.flatten().collect()
}

#[test]
fn values_are_at_all_of_their_places() {
    let values = load(&[
        "namespace=mesh",
        "trustDomain=example.org",
        "redirect=iptables",
        "image.registry=registry.example.com/mesh",
        "image.tag=1.0",
        "image.proxy=other/proxy@sha256:00",
        "controller.replicas=3",
        "controller.certificateLife=3600",
        "controller.resources.limits.memory=null",
        "controller.resources.requests.cpu=2",
        "egress.privateNames=false",
        "proxy.observeEdges=false",
        "proxy.dump=off",
    ]);
    let objects = objects(&values.unwrap());
    let text = yaml::write(&objects);
    for former in [
        "namespace: service-mesh",
        "cluster.local",
        ":dev",
        "name: service-mesh\n",
    ] {
        assert!(!text.contains(former), "{former} is in {text}");
    }
    let controller = &object(&objects, "Deployment", "controller")["spec"];
    assert_eq!(controller["replicas"], 3);
    let container = &controller["template"]["spec"]["containers"][0];
    assert_eq!(
        container["image"],
        "registry.example.com/mesh/diy-sm-controller:1.0"
    );
    let resources = serde_json::json!({"requests": {"cpu": "2", "memory": "64Mi"}, "limits": {}});
    assert_eq!(container["resources"], resources);
    let variable = |container: &Value, name: &str| {
        let mut variables = container["env"].as_array().unwrap().iter();
        let found = variables.find(|variable| variable["name"] == name);
        found.unwrap()["value"].clone()
    };
    assert_eq!(variable(container, "CERTIFICATE_LIFE"), "3600");
    let injector = &object(&objects, "Deployment", "injector")["spec"]["template"]["spec"];
    assert_eq!(
        injector["initContainers"][0]["image"],
        "other/proxy@sha256:00"
    );
    let init = "registry.example.com/mesh/diy-sm-proxy-init:1.0-iptables";
    assert_eq!(injector["initContainers"][1]["image"], init);
    for name in ["EGRESS_PRIVATE_NAMES", "PROXY_OBSERVE_EDGES"] {
        assert_eq!(variable(&injector["containers"][0], name), "false");
    }
    assert_eq!(variable(&injector["containers"][0], "PROXY_DUMP"), "off");
    assert_eq!(
        variable(&injector["containers"][0], "TRUST_DOMAIN"),
        "example.org"
    );
    let webhook = object(
        &objects,
        "MutatingWebhookConfiguration",
        "diy-service-mesh-injector",
    );
    assert_eq!(
        webhook["webhooks"][0]["clientConfig"]["service"]["namespace"],
        "mesh"
    );
}

#[test]
fn assignments_win_over_files_and_later_files_over_earlier_ones() {
    let file = |text: &str| ("values.yaml".to_owned(), text.to_owned());
    let files = [
        file("namespace: a\ncontroller: {replicas: 3}\n"),
        file("namespace: b\ninjector: {replicas: 4}\n"),
        file("# nothing\n"),
    ];
    let values = Values::load(&files, &["injector.replicas=5".into()]).unwrap();
    assert_eq!(values.namespace(), "b");
    let values = values.resolved();
    assert_eq!(values["controller"]["replicas"], 3);
    assert_eq!(values["injector"]["replicas"], 5);
}

#[test]
fn errors_have_the_path_the_value_and_what_was_expected() {
    for (assignment, parts) in [
        ("replicas", ["--set replicas", "expected PATH=VALUE"]),
        ("controler.replicas=3", ["controler", "expected one of"]),
        (
            "controller.replicas=many",
            ["controller.replicas", "\"many\", expected a whole number"],
        ),
        (
            "controller.replicas=-1",
            [
                "controller.replicas",
                "-1, expected a whole number, at least 0",
            ],
        ),
        ("controller=3", ["controller", "expected a map"]),
        (
            "namespace=A_B",
            ["namespace", "\"A_B\": expected a namespace"],
        ),
        ("namespace=null", ["namespace", "null, expected text"]),
        ("trustDomain=Upper", ["trustDomain", "\"Upper\""]),
        ("redirect=ebpf", ["redirect", "nftables, iptables"]),
        (
            "image.tag=a b",
            ["image.controller", "diy-sm-controller:a b"],
        ),
        ("image.pullPolicy=never", ["image.pullPolicy", "\"never\""]),
        (
            "proxy.dump=all",
            ["proxy.dump", "expected one of full, headers, off"],
        ),
        (
            "proxy.memoryLimit=1Mi",
            ["proxy.memoryLimit", "at least 32Mi"],
        ),
        ("proxy.drain=1d", ["proxy.drain", "expected a duration"]),
        (
            "controller.certificateLife=9",
            ["controller.certificateLife", "10 to"],
        ),
        (
            "controller.caLife=100",
            ["controller.caLife", "at least controller.certificateLife"],
        ),
        ("controller.log=a=b=c", ["controller.log", "\"a=b=c\""]),
        (
            "injector.resources.limits.memory=much",
            ["injector.resources.limits.memory", "quantity"],
        ),
    ] {
        let error = load(&[assignment]).expect_err(assignment).to_string();
        for part in parts {
            assert!(
                error.contains(part),
                "{assignment}: {part} is not in: {error}"
            );
        }
        assert!(error.contains("mesh install --schema"), "{error}");
    }
    let file = |text: &str| Values::load(&[("v.yaml".into(), text.into())], &[]).unwrap_err();
    assert!(
        file("- 1")
            .to_string()
            .starts_with("v.yaml: [1] is not a map")
    );
    assert!(file("a: b: c").to_string().contains("line 1"));
}

#[test]
fn output_has_no_secrets_and_is_the_same_in_each_run() {
    let values = load(&[]).unwrap();
    let text = yaml::write(&objects(&values));
    assert_eq!(text, yaml::write(&objects(&load(&[]).unwrap())));
    for secret in [
        "kind: Secret",
        "caBundle",
        "BEGIN ",
        "PRIVATE KEY",
        "token:",
        "CustomResource",
    ] {
        assert!(!text.contains(secret), "{secret} is in {text}");
    }
    let parsed = manifest::parse(&text).unwrap();
    assert_eq!(parsed, objects(&values));
    let kinds = definitions().into_iter().map(|one| one["kind"].clone());
    assert_eq!(Vec::from_iter(kinds), ["CustomResourceDefinition"; 2]);
}
