{{- /*
The image of a component: its complete reference in the values, or REGISTRY/NAME:TAG.
Arguments: the context, the component, the name of its image.
*/}}
{{- define "diy-service-mesh.image" -}}
{{- $values := (index . 0).Values -}}
{{- $component := index . 1 -}}
{{- $registry := ternary "" (printf "%s/" $values.image.registry) (empty $values.image.registry) -}}
{{- $suffix := ternary "-iptables" "" (and (eq $component "proxyInit") (eq $values.redirect "iptables")) -}}
{{- get $values.image $component | default (printf "%s%s:%s%s" $registry (index . 2) $values.image.tag $suffix) -}}
{{- end -}}
