//! The name of the workload of a pod, from the labels that its controller sets. Pure.

/// The name of the Deployment, StatefulSet, DaemonSet or Job of a pod with a name and labels; else
/// its own name.
pub fn workload<'a>(pod: &'a str, label: impl Fn(&str) -> Option<&'a str>) -> &'a str {
    let has = |name: &str| label(name).is_some();
    let Some((base, _)) = pod.rsplit_once('-') else {
        return pod;
    };
    if let Some(hash) = label("pod-template-hash") {
        let set = base
            .strip_suffix(hash)
            .and_then(|set| set.strip_suffix('-'));
        return set.unwrap_or(base);
    }
    let of_controller = [
        "controller-revision-hash",
        "batch.kubernetes.io/job-name",
        "job-name",
    ];
    if of_controller.into_iter().any(has) {
        base
    } else {
        pod
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workload_is_named_without_what_its_controller_appends() {
        for (pod, label, expected) in [
            ("web-7f9-x2x4z", ("pod-template-hash", "7f9"), "web"),
            ("web-api-7f9-x2x4z", ("pod-template-hash", "7f9"), "web-api"),
            // The name of its ReplicaSet is cut.
            ("web-7-x2x4z", ("pod-template-hash", "7f9"), "web-7"),
            ("db-0", ("controller-revision-hash", "db-5d8"), "db"),
            ("agent-x2x4z", ("controller-revision-hash", "5d8"), "agent"),
            (
                "load-1-x2x4z",
                ("batch.kubernetes.io/job-name", "load-1"),
                "load-1",
            ),
            ("web-1", ("app", "web"), "web-1"),
            ("web", ("pod-template-hash", "7f9"), "web"),
        ] {
            let labels = |name: &str| (name == label.0).then_some(label.1);
            assert_eq!(workload(pod, labels), expected);
        }
    }
}
