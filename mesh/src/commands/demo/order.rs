//! The order in which the demo starts workloads: workloads of Services first, then their clients.
//! Pure.

use serde_json::Value;

/// The pod of a workload, or its template. `None` for other objects.
pub fn pod(object: &Value) -> Option<&Value> {
    match object["kind"].as_str() {
        Some("Pod") => Some(object),
        Some("Deployment") => Some(&object["spec"]["template"]),
        _ => None,
    }
}

/// Removes and returns the workloads that no Service selects. Removes no workload if no Service
/// selects any.
pub fn take_clients(objects: &mut Vec<Value>) -> Vec<Value> {
    let is_service = |object: &&Value| object["kind"] == "Service";
    let services: Vec<Value> = objects.iter().filter(is_service).cloned().collect();
    let is_selected = |object: &Value, pod: &Value| {
        services.iter().any(|service| {
            service["metadata"]["namespace"] == object["metadata"]["namespace"]
                && selects(&service["spec"]["selector"], &pod["metadata"]["labels"])
        })
    };
    let is_server = |object: &Value| pod(object).is_some_and(|pod| is_selected(object, pod));
    if !objects.iter().any(is_server) {
        return Vec::new();
    }
    objects
        .extract_if(.., |object| pod(object).is_some() && !is_server(object))
        .collect()
}

/// Whether the selector of a Service selects these labels.
fn selects(selector: &Value, labels: &Value) -> bool {
    let selector = selector.as_object().filter(|selector| !selector.is_empty());
    selector.is_some_and(|selector| {
        let mut pairs = selector.iter();
        pairs.all(|(key, value)| labels[key] == *value)
    })
}

#[cfg(test)]
mod tests {
    use diy_mesh_sandbox::manifest;

    use super::*;

    fn names(objects: &[Value]) -> Vec<&str> {
        let workloads = objects.iter().filter(|object| pod(object).is_some());
        workloads
            .filter_map(|object| object["metadata"]["name"].as_str())
            .collect()
    }

    #[test]
    fn clients_of_the_walkthrough_start_after_the_servers() {
        let mut objects = manifest::embedded().objects().unwrap();
        let count = objects.len();
        let clients = take_clients(&mut objects);
        assert_eq!(names(&clients), ["http-client", "grpc-client"]);
        assert_eq!(objects.len() + clients.len(), count);
        assert!(names(&objects).contains(&"http-server-v1"));
    }

    #[test]
    fn workloads_without_a_service_start_at_once_if_there_are_no_others() {
        let pod =
            "{apiVersion: v1, kind: Pod, metadata: {name: a, namespace: b, labels: {app: a}}}";
        let service = "{apiVersion: v1, kind: Service, metadata: {name: a, namespace: c}, spec: {selector: {app: a}}}";
        let mut objects = manifest::parse(&format!("{pod}\n---\n{service}")).unwrap();
        assert!(take_clients(&mut objects).is_empty());
        assert_eq!(names(&objects), ["a"]);
    }
}
