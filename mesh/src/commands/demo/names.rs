//! Short names of pods, and a color for each pod.

use diy_mesh_sandbox::protocol::PodView;

/// The ANSI codes of colors that are readable on light and dark backgrounds.
const COLOR_CODES: [u8; 12] = [36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91];

/// One end of an exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Party {
    /// The short name of the pod, or an address outside the sandbox's pods.
    pub name: String,
    /// The short name of the workload, or an address without its port.
    pub workload: String,
    /// The color of the pod.
    pub color_code: Option<u8>,
}

/// The pods so far, in the order of their appearance.
#[derive(Default)]
pub struct Names {
    pods: Vec<PodName>,
}

#[derive(PartialEq, Eq)]
struct PodName {
    namespace: String,
    pod: String,
    workload: String,
}

impl Names {
    /// Records a pod.
    pub fn record(&mut self, pod: &PodView) {
        let name = PodName {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            workload: pod.workload.clone(),
        };
        if !self.pods.contains(&name) {
            self.pods.push(name);
        }
    }

    /// The party that a pod is.
    pub fn party(&self, namespace: &str, pod: &str, workload: &str) -> Party {
        Party {
            name: self.short(namespace, pod),
            workload: self.workload(namespace, workload),
            color_code: Some(self.color_code(namespace, pod)),
        }
    }

    /// The name of the workload, with the suffix of the pod if the workload has several pods, and
    /// with the namespace if several namespaces have such a workload.
    pub fn short(&self, namespace: &str, pod: &str) -> String {
        let Some(own) = self.find(namespace, pod).map(|index| &self.pods[index]) else {
            return format!("{namespace}/{pod}");
        };
        let name = self.workload(namespace, &own.workload);
        let is_replica = |other: &&PodName| {
            other.workload == own.workload && other.namespace == namespace && other.pod != pod
        };
        if self.pods.iter().any(|other| is_replica(&other)) {
            let suffix = pod.rsplit('-').next().unwrap_or(pod);
            format!("{name}-{suffix}")
        } else {
            name
        }
    }

    /// The name of a workload, with the namespace if several namespaces have such a workload.
    fn workload(&self, namespace: &str, workload: &str) -> String {
        let is_ambiguous = self
            .pods
            .iter()
            .any(|other| other.workload == workload && other.namespace != namespace);
        if is_ambiguous {
            format!("{namespace}/{workload}")
        } else {
            workload.to_owned()
        }
    }

    /// The ANSI code of the color of a pod.
    pub fn color_code(&self, namespace: &str, pod: &str) -> u8 {
        let index = self.find(namespace, pod).unwrap_or(0);
        COLOR_CODES[index % COLOR_CODES.len()]
    }

    fn find(&self, namespace: &str, pod: &str) -> Option<usize> {
        self.pods
            .iter()
            .position(|name| name.namespace == namespace && name.pod == pod)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_short_as_they_are_unique() {
        let mut names = Names::default();
        for (namespace, pod, workload) in [
            ("shop", "cart-7f-abc", "cart"),
            ("shop", "till-7f-abc", "till"),
            ("shop", "till-7f-xyz", "till"),
            ("test", "web-7f-abc", "web"),
            ("prod", "web-7f-abc", "web"),
        ] {
            let (namespace, name, workload) = (namespace.into(), pod.into(), workload.into());
            names.record(&PodView {
                namespace,
                name,
                workload,
                ..PodView::default()
            });
        }
        assert_eq!(names.short("shop", "cart-7f-abc"), "cart");
        assert_eq!(names.short("shop", "till-7f-xyz"), "till-xyz");
        assert_eq!(names.short("test", "web-7f-abc"), "test/web");
        assert_eq!(names.short("test", "other"), "test/other");
        assert_ne!(
            names.color_code("shop", "till-7f-abc"),
            names.color_code("shop", "till-7f-xyz")
        );
    }
}
