// Renders templates as Ollama does, with Go's own text/template: requests as JSON from the standard input, texts as JSON.
package main

import (
	"encoding/json"
	"os"
	"strings"
	"text/template"
)

type message struct{ Role, Content string }

type request struct {
	Template string
	Messages []*message
}

func main() {
	var requests []request
	if err := json.NewDecoder(os.Stdin).Decode(&requests); err != nil {
		panic(err)
	}
	texts := []string{}
	for _, asked := range requests {
		parsed := template.Must(template.New("").Option("missingkey=zero").Parse(asked.Template))
		var text strings.Builder
		values := map[string]any{"System": "", "Messages": asked.Messages, "Response": ""}
		if err := parsed.Execute(&text, values); err != nil {
			panic(err)
		}
		texts = append(texts, text.String())
	}
	if err := json.NewEncoder(os.Stdout).Encode(texts); err != nil {
		panic(err)
	}
}
