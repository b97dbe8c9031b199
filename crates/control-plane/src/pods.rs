//! The fields of Pods that the controller and the command line read. All others are skipped while
//! the text is parsed. Plain values, with the names of the API.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};

macro_rules! slim {
    ($($name:ident { $($(#[$attribute:meta])* $field:ident: $type:ty,)* })*) => { $(
        #[derive(Clone, Debug, Default, Serialize, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        pub struct $name { $($(#[$attribute])* pub $field: $type,)* }
    )* };
}

type List<T> = Option<Vec<T>>;
type Text = Option<String>;

slim! {
    PodSpec {
        containers: List<Container>,
        host_network: Option<bool>,
        init_containers: List<Container>,
        node_name: Text,
        readiness_gates: List<ReadinessGate>,
        service_account_name: Text,
    }

    Container {
        args: List<String>,
        env: List<Named>,
        image: Text,
        name: String,
        ports: List<ContainerPort>,
    }

    Named {
        name: String,
    }

    ContainerPort {
        container_port: i32,
        name: Text,
        protocol: Text,
    }

    ReadinessGate {
        condition_type: String,
    }

    PodStatus {
        conditions: List<Condition>,
        container_statuses: List<ContainerStatus>,
        init_container_statuses: List<ContainerStatus>,
        phase: Text,
        #[serde(rename = "podIP")]
        pod_ip: Text,
        #[serde(rename = "podIPs")]
        pod_ips: List<PodIp>,
    }

    Condition {
        status: String,
        #[serde(rename = "type")]
        type_: String,
    }

    PodIp {
        ip: String,
    }

    ContainerStatus {
        last_state: Option<ContainerState>,
        name: String,
        ready: bool,
        restart_count: i32,
        state: Option<ContainerState>,
    }

    ContainerState {
        running: Option<Running>,
        terminated: Option<Terminated>,
        waiting: Option<Waiting>,
    }

    Running {}

    Terminated {
        exit_code: i32,
        finished_at: Option<Time>,
        reason: Text,
    }

    Waiting {
        reason: Text,
    }
}
